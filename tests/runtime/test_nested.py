"""Collectives over several link levels are run level by level: numbers of the flat ones, bytes of the plan."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import GroupRate
from autopar.costmodel.collective_time import chosen_algorithm, issued_as, nesting
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.trace import trace
from autopar.mesh import Mesh, mesh_of
from autopar.peak_memory.predict import predict_peak
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.plans.plan import Plan, plan_of
from autopar.runtime.load_program import axes_of
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.axis import Axis
from autopar.sbp.candidates import annotate
from autopar.sbp.convert import all_gather, all_reduce, begin_together, reduce_scatter
from autopar.sbp.placement import I, P, S
from autopar.sbp.redistribute import Collective
from autopar.sbp.uneven.dim_parts import DimParts
from autopar.verify.count_collectives import count_collectives
from autopar.verify.one_step import planned_collectives
from tests.workers import Ranks, device_mesh

HOSTS = LinkLevel(0, 1e-5, 1e8)


def cluster_of(*sizes: int) -> Cluster:
    """Slow links between hosts, inside of which blocks of these sizes have fast ones."""
    inside = (LinkLevel(size, 1e-7, 1e11 / 4**level) for level, size in enumerate(sizes))
    rates = {"float32": 1e11}, 1e11, 2**34, "made up"
    return Cluster("hosts", (*inside, HOSTS), *rates, device_type="cpu", algorithms=("ring", "nested"))


def test_what_crosses_the_outer_links_is_priced_and_named() -> None:
    cluster, mesh = cluster_of(2), Mesh((4,), ("dp",))
    reduced = Collective("all_reduce", (0,), 2**20, "backward")
    assert chosen_algorithm(cluster, mesh, reduced) == "nested"
    assert chosen_algorithm(cluster, mesh, replace(reduced, kind="all_to_all")) == "exchange"
    inside = [("reduce_scatter", 2**20, 0), ("all_reduce", 2**19, 1), ("all_gather", 2**20, 0)]
    assert [(one.kind, one.num_bytes, one.level) for one in issued_as(reduced, cluster, mesh)] == inside
    for apart in (replace(cluster, algorithms=("ring",)), replace(cluster, device_type="cuda"), cluster_of(4)):
        assert issued_as(reduced, apart, mesh) == (reduced,)
    assert "all_reduce, nested" in planned("ddp", Net(), torch.zeros(8, 8), is_ahead=False).explain()
    uneven = cluster_of(3)
    assert nesting(uneven, (4,), (0,)) is None and chosen_algorithm(uneven, mesh, reduced) == "ring"


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("latency_s", [1e-7, 1e-3])
@pytest.mark.parametrize("least_s", [0.0, 1e-2])
def test_the_range_of_bytes_is_that_of_the_price(kind: str, latency_s: float, least_s: float) -> None:
    """Slow starts inside make small ones flat: what is run level by level is what is priced so, to the byte."""
    cluster, rates = cluster_of(2), (GroupRate(2, least_s=least_s),)
    cluster = replace(cluster, levels=(replace(cluster.levels[0], latency_s=latency_s, group_rates=rates), HOSTS))
    mesh, how = Mesh((4,), ("dp",)), nesting(cluster, (4,), (0,))
    assert how is not None
    fewest = how.ranges[kind][0]
    assert fewest > 1 or not least_s
    sizes = [1, 10**3, 10**6, 10**9, *(int(fewest) + step for step in (-1, 0, 1) if fewest + step > 0)]
    for num_bytes in sizes:
        one = Collective(kind, (0,), num_bytes, "forward")
        assert (chosen_algorithm(cluster, mesh, one) == "nested") == how.takes(kind, num_bytes), num_bytes


def same_as_flat(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[list[Collective], list[Collective]]]:
    """Each collective on the axis of all ranks, level by level and flat; (issued, as the plan has it) for each."""
    mesh, cluster = device_mesh(shape, ("a", "b")[: len(shape)]), cluster_of(*sizes)
    axes, joint = tuple(range(len(shape))), [tuple(range(len(shape)))] * (len(shape) > 1)
    nested, flat = axes_of(mesh, joint, cluster)[-1], axes_of(mesh, joint)[-1]
    assert nested.nest is not None and flat.nest is None
    torch.manual_seed(dist.get_rank())
    x, found = torch.randn(3, 2 * nested.size, 5, dtype=torch.float64), []

    def compare(what: str, run: Any, num_bytes: int) -> None:
        with count_collectives(mesh) as issued:
            made = run(nested)
        torch.testing.assert_close(made, run(flat), msg=what)
        one = Collective(what, axes, num_bytes, "forward")
        found.append((list(issued), list(issued_as(one, cluster, mesh_of(mesh)))))

    num_bytes = x.numel() * x.itemsize
    compare("all_reduce", lambda axis: all_reduce(x, axis), num_bytes)
    compare("all_reduce", lambda axis: all_reduce(x.movedim(1, 0), axis, dist.ReduceOp.MAX), num_bytes)
    compare("all_reduce", lambda axis: all_reduce(x[0, 0, 0], axis), 8)
    for dim in range(3):
        compare("all_gather", lambda axis, dim=dim: all_gather(x, axis, DimParts(dim)), num_bytes * nested.size)
    compare("reduce_scatter", lambda axis: reduce_scatter(x, axis, DimParts(1)), num_bytes)
    return found


def under_way_together(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Buckets of all three kinds, several under way, waited for in any order: the same as one after the other."""
    mesh = device_mesh(shape, ("a", "b")[: len(shape)])
    axis = axes_of(mesh, [tuple(range(len(shape)))] * (len(shape) > 1), cluster_of(*sizes))[-1]
    flat = replace_nest(axis)
    torch.manual_seed(dist.get_rank())
    kinds = [(P, I), (P, S(0)), (S(1), I), (P, I), (S(0), I)]
    for order in itertools.islice(itertools.permutations(range(len(kinds))), 0, None, 17):
        tensors = [[torch.randn(axis.size, 3), torch.randn(2 * axis.size, axis.size)] for _ in kinds]
        ends = [([src] * 2, [dst] * 2) for src, dst in kinds]
        begun = [begin_together(axis, *each, *x, is_async=True) for each, x in zip(ends, tensors)]
        for number in order:
            expected = begin_together(flat, *ends[number], *tensors[number])()
            torch.testing.assert_close(begun[number](), expected)
        assert axis.nest is not None and not axis.nest.under_way


def replace_nest(axis: Axis) -> Axis:
    return replace(axis, nest=None)


@pytest.mark.multirank
@pytest.mark.parametrize(("shape", "sizes"), [((4,), (2,)), ((2, 2), (2,))], ids=str)
def test_four_ranks_compute_what_flat_collectives_do(ranks4: Ranks, shape: tuple, sizes: tuple) -> None:
    for issued, expected in itertools.chain(*ranks4.run(same_as_flat, shape, sizes)):
        assert issued == expected and len(issued) > 1
    ranks4.run(under_way_together, shape, sizes)


@pytest.mark.multirank
@pytest.mark.parametrize(("shape", "sizes"), [((8,), (4,)), ((2, 4), (2, 2)), ((8,), (2, 2))], ids=str)
def test_eight_ranks_compute_what_flat_collectives_do(ranks8: Ranks, shape: tuple, sizes: tuple) -> None:
    for issued, expected in itertools.chain(*ranks8.run(same_as_flat, shape, sizes)):
        assert issued == expected and len(issued) > 1
    ranks8.run(under_way_together, shape, sizes)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def planned(way: str, model: nn.Module, x: torch.Tensor, *, is_ahead: bool) -> Plan:
    """A hand plan on two hosts of two; `is_ahead`: with prefetched buckets."""
    graph, mesh, cluster = trace(skeleton(model), (x,), {}), Mesh((4,), ("dp",)), cluster_of(2)
    folded = fold(graph)
    by_hand = hand_plans(graph, folded, annotate(graph, mesh, folded), mesh)["ddp" if way == "ddp" else "zero3"]
    again = by_hand.regathered if way == "zero3" else frozenset()
    places = parameter_buckets(graph, folded, 9 * 8 * 8, is_prefetched=is_ahead)
    return plan_of(graph, replace(by_hand, parameter_buckets=places, regathered=again), mesh, cluster)


def train(way: str, is_ahead: bool) -> list[tuple[Counter, Counter]]:
    """Gradients under a hand plan, beside one device; (issued, planned)."""
    torch.manual_seed(0)
    model, alone, x = Net().double(), Net().double(), torch.randn(8, 8, dtype=torch.float64)
    alone.load_state_dict(model.state_dict())
    plan = planned(way, model, x, is_ahead=is_ahead)
    sharded = autopar.compile(model, device_mesh((4,), ("dp",)), args=(x,), plan=plan)
    found = []
    for _ in range(2):
        with count_collectives(device_mesh((4,), ("dp",))) as issued:
            sharded(x).backward()
        alone(x).backward()
        found.append((Counter(issued), Counter(planned_collectives(plan)[0])))
    for mine, other in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
    return found


@pytest.mark.multirank
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("way", ["ddp", "zero2", "zero3"])
def test_a_plan_on_two_hosts_trains_as_on_one_device(ranks4: Ranks, way: str, is_ahead: bool) -> None:
    for issued, expected in itertools.chain(*ranks4.run(train, way, is_ahead)):
        assert issued == expected and any(one.level == 1 for one in issued)


def test_the_predicted_peak_has_what_the_levels_inside_hold() -> None:
    """Of a bucket that is reduced level by level, half is held once more while it crosses between hosts."""
    plan = planned("ddp", Net(), torch.zeros(8, 8), is_ahead=False)
    nested, flat = (replace(plan, cluster=replace(plan.cluster, algorithms=names)) for names in (BOTH, ("ring",)))
    (more,), (less,) = (
        [dict(predict_peak(one.graph, one.mesh, one.assignment, on=one.cluster).phases)["0B0"]]
        for one in (nested, flat)
    )
    assert less <= more <= less + 4 * 9 * 8 * 8


BOTH = ("ring", "nested")
