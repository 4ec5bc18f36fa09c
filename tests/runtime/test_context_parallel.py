"""Models whose sequence is split between ranks train as one device does, by each way to get the keys of other parts."""

import pytest

from autopar.sbp.redistribute import Collective
from tests.runtime.training import plans_for, train_under
from tests.workers import Ranks

WAYS = {"p2p": "permute", "all_gather": "all_gather", "a2a": "all_to_all"}
ALONE = tuple(f"megatron:cp=4,{way}" for way in WAYS)
BESIDE = tuple(f"megatron:{others},{way}" for others in ("cp=2", "cp=2,tp=2", "cp=2,zero3") for way in WAYS)


def kind_of_exchange(plan: str) -> str:
    return next(kind for way, kind in WAYS.items() if way in plan)


def check(reports: list[list[dict]], kinds: tuple[str, ...]) -> None:
    """Of every rank, for each plan."""
    for of_rank in reports:
        for kind, report in zip(kinds, of_rank, strict=True):
            assert max(report["first"][0], report["last"][0]) < 1e-5, (kind, report)  # losses are float32
            assert report["issued"] == report["predicted"], kind
            used = {one.kind for one in report["issued"] if isinstance(one, Collective)}
            assert kind_of_exchange(kind) in used, (kind, used)


@pytest.mark.multirank
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize(("shape", "kinds"), [((4,), ALONE), ((2, 2), BESIDE)], ids=["cp=4", "cp=2"])
def test_trains_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    """With causal attention of grouped heads, with a mask and rotary or learned positions."""
    check(ranks4.run(train_under, name, plans_for(name, shape, kinds)), kinds)


@pytest.mark.multirank
def test_trains_like_one_device_on_eight_ranks(ranks8: Ranks) -> None:
    """On 4 ranks two query heads share a key head that 4 do not divide; 8 tokens on 8 ranks have no equal halves."""
    check(ranks8.run(train_under, "llama", plans_for("llama", (8,), ("megatron:cp=8,p2p",))), ("megatron:cp=8,p2p",))
    kinds = tuple(f"megatron:cp=4,{way}" for way in WAYS)
    check(ranks8.run(train_under, "llama", plans_for("llama", (2, 4), kinds)), kinds)
    kinds = tuple(f"megatron:cp=2,tp=2,{way}" for way in WAYS)
    check(ranks8.run(train_under, "llama", plans_for("llama", (2, 2, 2), kinds)), kinds)
