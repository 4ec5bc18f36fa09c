"""Models whose sequence is split between ranks train as one device does, by each way to get the keys of other parts."""

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace_with_loss import traced
from autopar.mesh import as_mesh
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.redistribute import Collective
from tests.runtime import staged
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


def in_stages(kind: str, schedule: str) -> StagedPlan:
    """Of microbatches of two samples."""
    case = staged.sample("llama")
    graph = traced(skeleton(case.model), case.loss_fn, case.args, case.kwargs)
    asked = PlanRequest(num_microbatches=4, schedule=schedule)
    return hand_plan_in_stages(kind, graph, as_mesh("pp=2,cp=2"), load_cluster("free-links"), asked)


@pytest.mark.multirank
def test_stages_train_like_one_device(ranks4: Ranks) -> None:
    """The loss of a microbatch is a mean over tokens that the ranks of the sequence count together."""
    kinds = [(f"megatron:cp=2,{way}", schedule) for way, schedule in zip(WAYS, ("1f1b", "zero-bubble", "1f1b"))]
    for of_rank in ranks4.run(staged.train_under, [({"name": "llama"}, in_stages(*kind)) for kind in kinds]):
        for kind, report in zip(kinds, of_rank, strict=True):
            assert max(report["first"][0], report["last"][0]) < 1e-5, (kind, report["first"], report["last"])
            assert report["issued"] == report["planned"], kind
            assert kind_of_exchange(kind[0]) in {one.kind for one in report["issued"]}, kind
