"""The batch in shares: numbers of one device, whatever each rank gets."""

import pytest
import torch

import autopar
from autopar.api import _parts
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.request import ANYTHING
from tests.runtime.shares_model import batch_of, in_shares, net, on_groups
from tests.runtime.test_uneven_parts import _check
from tests.runtime.training import plan_called
from tests.runtime.uneven_model import train_odd
from tests.workers import Ranks

KINDS = ("searched", "random:0", "random:1", "ddp", "zero3")


@pytest.mark.multirank
def test_on_four_ranks(ranks4: Ranks) -> None:
    """Batch statistics, ignored labels, two losses, a batch of another size; the tensor axis beside shares."""
    for found in ranks4.run(in_shares, (4,), (5, 1, 3, 2), (11, 11, 7), "global"):
        assert found["difference"] < 1e-11 and set(found["layouts"].values()) == {"S(0:5+1+3+2)"}
    for rank, found in enumerate(ranks4.run(in_shares, (2, 2), (5, 2), (7, 7), "local")):
        assert found["difference"] < 1e-11 and found["rows"] == (5, 2)[rank // 2]


@pytest.mark.multirank
def test_any_plan_in_shares(ranks4: Ranks) -> None:
    _check(ranks4.run(train_odd, (4,), KINDS, {"batch": 9}, ((0, (3, 1, 4, 1)),)))
    _check(ranks4.run(train_odd, (2, 2), KINDS, {}, ((0, (5, 2)),)))
    # the rank with the most rows has not the largest parts of parameters besides, so that no rank sends what is priced
    _check(ranks4.run(train_odd, (2, 2), ("zero3", "random:0"), {}, ((0, (2, 5)),)), largest=-1)
    _check(ranks4.run(train_odd, (2, 2), KINDS, {"batch": 8}, ((1, (5, 3)),)))


@pytest.mark.multirank
def test_on_three_ranks() -> None:
    ranks = Ranks(3)
    try:
        _check(ranks.run(train_odd, (3,), KINDS, {}, ((0, (4, 1, 2)),)))
        for found in ranks.run(in_shares, (3,), (1, 4, 2), (7, 7, 5), "global"):
            assert found["difference"] < 1e-11
        for found in ranks.run(on_groups, (1, 2), 3.0, 3000):
            ((fast, *slow),) = found["shares"]
            assert found["difference"] < 1e-11 and fast > 2 * max(slow)
    finally:
        ranks.stop()


@pytest.mark.parametrize(
    ("shares", "mesh", "options", "message"),
    [
        ((5, 5), "dp=2", {}, "10 rows, the batch has 8"),
        ((8, 0), "dp=2", {}, "leave a rank that gets none out of the mesh"),
        ((4, 2, 2), "dp=2", {}, "no axis of the batch with as many"),
        ({"tp": (6, 2, 0)}, "dp=2,tp=2", {}, "one row of the batch or more"),
        ({"ep": (6, 2)}, "dp=2,tp=2", {}, "no axis ep with as many"),
        ("62", "dp=2", {}, "expects the rows"),
        ((6.0, 2), "dp=2", {}, "expects the rows"),
        ((6, 2), 2, {}, "name the axes"),
        ((5, 3), "dp=2", {"num_microbatches": 2}, "in 2 equal microbatches"),
        ((7, 1), "pp=2,dp=2", {"num_microbatches": 4}, "in 4 equal microbatches"),
    ],
)
def test_bad_shares_are_refused(shares: object, mesh: object, options: dict, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        autopar.plan(net(), mesh, cluster="cpu", args=batch_of(8), shares=shares, **options)


def test_a_plan_keeps_its_shares_in_its_file() -> None:
    model, args = net(), batch_of(8)
    plan = autopar.plan(model, "dp=2,tp=2", cluster="free-links", args=args, shares=(6, 2))
    again = type(plan).loads(plan.dumps(), trace(skeleton(model), args, {}), Mesh((2, 2), ("dp", "tp")))
    assert again.mesh.shares == ((0, (6, 2)),) and again.assignment == plan.assignment
    assert "S(0:6+2)" in plan.explain()


def test_the_largest_share_is_what_memory_and_time_are_of() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device="meta") for _ in range(4)))
    graph = trace(model, (torch.randn(64, 512, device="meta"),), {})
    each = [(32, 32), (56, 8), (8, 56)]
    costs = {shares: plan_called("ddp", graph, Mesh((2,), ("dp",), ((0, shares),))).costs for shares in each}
    even = plan_called("ddp", graph, Mesh((2,), ("dp",))).costs
    assert costs[32, 32].total_memory_bytes == even.total_memory_bytes
    assert costs[56, 8].total_memory_bytes == costs[8, 56].total_memory_bytes > even.total_memory_bytes
    assert costs[56, 8].step_s == costs[8, 56].step_s > even.step_s


def test_parts_of_ranks_that_are_not_planned_yet_are_refused() -> None:
    with pytest.raises(AutoparError, match="not known before planning; give shares="):
        _parts(None, "local", ANYTHING, None, load_cluster("2 v100 + 2 p100"))
