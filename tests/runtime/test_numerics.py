"""The sharded model computes what the model computes: forward, every gradient, and the
state after three AdamW steps.
"""

from collections import Counter
from dataclasses import replace

import pytest

from autopar.sbp.redistribute import Collective
from tests.runtime.training import plans_for, train_under
from tests.workers import Ranks
from tests.zoo import ZOO

# HF losses, and the float32 casts inside HF norms and rotary embeddings, compute in float32 whatever the model's dtype.
TOLERANCE = {"mlp": 1e-9, "vgg13": 1e-9, "resnet": 1e-9, "vit": 1e-9, "gpt2": 1e-5, "llama": 1e-5, "bert": 1e-5}
# Each kind of plan on the mesh that is the harder one for it; `make test-full` has the others.
ON_FOUR = {(4,): ("ddp", "zero3", "random:0"), (2, 2): ("searched", "megatron", "random:1")}


def _without_bytes(collectives: Counter[Collective]) -> Counter[Collective]:
    return Counter(replace(each, num_bytes=0) for each in collectives.elements())


def _check(reports: list[list[dict]], name: str) -> None:
    for rank, of_rank in enumerate(reports):
        for report in of_rank:
            where = f"{name} under {report['kind']} on rank {rank}"
            for when in ("first", "last"):
                difference, tensor = report[when]
                assert difference <= TOLERANCE[name], f"{where}: {when}: {tensor} differs by {difference:.2e}"
            if rank and report["uneven"]:  # no rank has larger parts than the first, and others send as many tensors
                assert _without_bytes(report["issued"]) == _without_bytes(report["predicted"]), where
            else:
                assert report["issued"] == report["predicted"], where
            assert sum(report["issued"].values()) > 0, f"{where}: no collective was issued"
            assert report["kind"] == "ddp" or report["split"] > 0, f"{where}: no parameter is split"


@pytest.mark.multirank
@pytest.mark.parametrize("shape", ON_FOUR, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_trains_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    _check(ranks4.run(train_under, name, plans_for(name, shape, ON_FOUR[shape])), name)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(("shape", "other"), [((4,), (2, 2)), ((2, 2), (4,))], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_trains_like_one_device_on_the_other_mesh(
    ranks4: Ranks, name: str, shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    _check(ranks4.run(train_under, name, plans_for(name, shape, ON_FOUR[other])), name)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "shape"), [("llama", (4,)), ("llama", (2, 2)), ("gpt2", (2, 2)), ("bert", (2, 2))], ids=str
)
def test_trains_like_one_device_split_along_the_sequence(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    kinds = ("megatron:sp", "megatron:sp,zero3") if len(shape) > 1 else ("megatron:sp",)
    _check(ranks4.run(train_under, name, plans_for(name, shape, kinds)), name)


ON_EIGHT = {(8,): ("ddp", "zero3"), (2, 2, 2): ("searched", "megatron", "random:0")}


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("shape", ON_EIGHT, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_trains_like_one_device_on_eight(ranks8: Ranks, name: str, shape: tuple[int, ...]) -> None:
    kinds = ON_EIGHT[shape]
    _check(ranks8.run(train_under, name, plans_for(name, shape, kinds)), name)
