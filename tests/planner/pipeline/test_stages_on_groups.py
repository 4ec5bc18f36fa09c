"""Stages on groups of devices that differ: the cut by each group's own speed."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.api import _text_of
from autopar.costmodel.cluster.device_groups import joined, orders
from autopar.costmodel.cluster.load_cluster import Cluster, LinkLevel, load_cluster
from autopar.costmodel.stage_transfer import FREE, transfers
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.ir.folding.fold import fold
from autopar.ir.passes.keep_loss import loss_only
from autopar.mesh import Devices, Mesh
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.choose_devices import choose_devices
from autopar.planner.pipeline.hand_points import Model, model_of, profiled
from autopar.planner.pipeline.partition import Blocks, Partition, partition
from autopar.planner.pipeline.stage_times import as_run, cut_within, in_flight, stage_times, waiting
from autopar.planner.pipeline.sweep import Staged, sweep
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages, plan_by_hand
from autopar.plans.staged_plan import StagedPlan, check_order
from autopar.schedule.orders import Schedule
from bench.problem import example_of, graph_of
from bench.suite import Case
from tests.planner.pipeline.test_partition import _random_blocks, _stage

V100, P100 = load_cluster("v100"), load_cluster("p100")
LINK = LinkLevel(0, V100.levels[0].latency_s, V100.levels[0].bandwidth_bytes_per_s)
CLUSTER = joined([(2, V100), (2, P100)])
MESH, MESH_OF_RANK = Mesh((2, 2), ("pp", "dp")), Mesh((2,), ("dp",))


@pytest.fixture(scope="module")
def graph():
    return loss_only(graph_of(example_of(Case("gpt2", "v100-25g", "8", 16, sequence=64, layers=8))))


@pytest.mark.parametrize("seed", range(10))
def test_the_cut_is_that_of_brute_force(seed: int) -> None:
    """Groups of 2 and 4 devices, so that one rank of three is of the first; the others are slower, each op by as much
    as it likes.
    """
    blocks, draw = _random_blocks(np.random.default_rng(seed), 9), random.Random(seed)
    factors = np.array([draw.uniform(1, 4) for _ in range(9)])
    slow = replace(blocks, forward_s=blocks.forward_s * factors, backward_s=blocks.backward_s * factors)
    schedule = Schedule("1f1b", 3, 3, 6)
    own = as_run(replace(blocks, by_group=((2, blocks), (4, slow))), schedule)
    assert own.of_stage == (blocks, slow, slow) or [x.forward_s[1] for x in own.of_stage] == [
        x.forward_s[1] for x in (blocks, slow, slow)
    ]
    each = [blocks.forward_s + blocks.backward_s] + 2 * [slow.forward_s + slow.backward_s]
    best = min(
        max(times[a:b].sum() for times, a, b in zip(each, (0, *cuts), (*cuts, 9)))
        for cuts in itertools.combinations(range(1, 9), 2)
    )
    found = partition(own, in_flight(schedule), float("inf"), waiting=waiting(schedule))
    assert max(found.times_s) == pytest.approx(best)
    times = stage_times(own, found, [FREE])
    assert [x.forward_s + x.backward_s + x.weight_s for x in times] == pytest.approx(list(found.times_s))


def test_a_point_of_the_sweep_is_its_stages_each_on_its_own_devices(graph) -> None:
    model = model_of(graph, fold(graph), num_stages=2)
    request = PlanRequest(memory_limit_bytes=1e12, num_microbatches=4, schedule="1f1b")
    point = sweep(model, ((2, Mesh((2,), ("dp",))),), CLUSTER, request)[0]
    plan = plan_by_hand(model, point, CLUSTER, request.training)
    assert [stage.cluster for stage in plan.stages] == [V100, P100]
    assert plan.step_s == pytest.approx(point.step_s, rel=0.02)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("limits", [(40.0, 80.0), (80.0, 40.0), (40.0, math.inf)])
def test_each_stage_keeps_to_the_limit_of_its_own_devices(seed: int, limits: tuple[float, float]) -> None:
    """The first of three ranks is of one group, the others are of another: recomputation, too, by each one's limit."""
    blocks = _random_blocks(np.random.default_rng(seed), 9)
    slow = replace(blocks, forward_s=2 * blocks.forward_s, backward_s=2 * blocks.backward_s)
    schedule, each = Schedule("1f1b", 3, 3, 6), (blocks, slow, slow)
    own, own_limits = as_run(replace(blocks, by_group=((2, blocks), (4, slow))), schedule), (limits[0], *2 * limits[1:])

    def step_s(ends: tuple[int, ...]) -> float:
        stages = zip(each, ends, ends[1:], in_flight(schedule), own_limits)
        return max(_stage(one, a, b, kept, limit) for one, a, b, kept, limit in stages)

    best = min(step_s((0, *cuts, 9)) for cuts in itertools.combinations(range(1, 9), 2))
    found = cut_within(own, schedule, own_limits)
    assert (best == math.inf) == (found is None)
    if found is not None:
        times = zip((*found.starts, 9), (*found.starts[1:], 9), each, in_flight(schedule), own_limits)
        exact = max(_stage(one, a, b, kept, limit) for a, b, one, kept, limit in times)
        assert exact == pytest.approx(best, rel=0.1) and max(found.times_s) <= best * (1 + 1e-9)
        assert all(used <= limit + 1e-9 for used, limit in zip(found.memory_bytes, own_limits))


def _with_memory(cluster: Cluster, mib: int) -> Cluster:
    """The devices with so much memory that a plan may use."""
    return replace(cluster, memory_bytes=math.ceil(mib * 2**20 / 0.9))


@pytest.mark.parametrize("mib", [(900, 8000), (8000, 600)])
def test_the_cut_within_the_memory_of_each_group_is_that_of_brute_force(graph, mib: tuple[int, int]) -> None:
    small = joined([(2, _with_memory(V100, mib[0])), (2, _with_memory(P100, mib[1]))])
    model = model_of(graph, fold(graph), num_stages=2)
    request = PlanRequest(num_microbatches=4, schedule="1f1b").on(small)
    points, limits = sweep(model, ((2, MESH_OF_RANK),), small, request), [size * 2**20 for size in mib]
    assert request.rank_limits(small, 2) == pytest.approx(limits)

    def by_hand(point: Staged, start: int) -> StagedPlan:
        cut = Partition((0, start), (0, 0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
        return plan_by_hand(model, replace(point, partition=cut), small, request.training)

    flavours = {point.plan: point for point in points}.values()
    every = [by_hand(point, start) for point in flavours for start in range(1, len(model.starts))]
    fitting = [plan for plan in every if all(used <= limit for used, limit in zip(plan.memory_bytes, limits))]
    best = min(fitting, key=lambda plan: plan.step_s)
    assert max(best.memory_bytes) > min(limits)  # it does not fit in the least of all
    least = sweep(model, ((2, MESH_OF_RANK),), small, replace(request, memory_limit_bytes=min(limits)))
    assert points[0].step_s < min((point.step_s for point in least), default=math.inf)
    written = plan_by_hand(model, points[0], small, request.training)
    assert written.step_s <= 1.02 * best.step_s
    assert all(used <= 1.01 * limit for used, limit in zip(written.memory_bytes, limits))


def test_peaks_are_within_the_limit_of_each_group_and_the_plan_says_so(graph) -> None:
    small = joined([(2, _with_memory(V100, 900)), (2, _with_memory(P100, 8000))])
    asked = PlanRequest(num_microbatches=4, schedule="1f1b")
    plan = choose_plan(graph, MESH, small, asked, predict=rank_peaks)
    assert plan.peak_bytes[0] <= 900 * 2**20 < plan.peak_bytes[1]
    assert "(limit 900 MiB on rank 0, 7.81 GiB on rank 1)" in plan.explain()
    assert [stage.memory_limit_bytes <= 900 * 2**20 for stage in plan.stages] == [True, False]
    again = StagedPlan.loads(plan.dumps(), graph, MESH, is_own=True)
    assert again.rank_limits_bytes == plan.rank_limits_bytes
    least = choose_plan(graph, MESH, small, replace(asked, memory_limit_bytes=900 * 2**20), predict=rank_peaks)
    assert max(least.peak_bytes) <= 900 * 2**20 and plan.step_s <= least.step_s * (1 + 1e-9)


def test_a_group_whose_limit_nothing_meets_is_named(graph) -> None:
    small = joined([(2, V100), (2, _with_memory(P100, 60))])
    with pytest.raises(InfeasibleError, match=r"per device of rank 1: .* the limit of rank 1 of the pipeline"):
        choose_plan(graph, MESH, small, PlanRequest(num_microbatches=4, schedule="1f1b"))


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 4), ("interleaved", 8)])
def test_only_sends_across_are_by_the_link_between_groups(graph, schedule: str, num_stages: int) -> None:
    """Ranks 0 and 1 are of V100 in one node, ranks 2 and 3 of P100 in nodes of one: sends by NVLink, the slow link,
    and P100's network, and where stages go round, by the slow link again.
    """
    alone = replace(P100, levels=(LinkLevel(0, 3e-5, 1e9),))
    slow, model = joined([(4, V100), (4, alone)], LinkLevel(0, 1e-3, 1e8)), model_of(graph, fold(graph), num_stages=8)
    request = PlanRequest(num_microbatches=8, schedule=schedule).on(slow)
    points = sweep(model, ((4, MESH_OF_RANK),), slow, request)
    point = next(one for one in points if one.schedule.num_stages == num_stages)
    plan = plan_by_hand(model, point, slow, request.training)
    assert plan.step_s == pytest.approx(point.step_s, rel=0.02)
    by_rank = [V100.levels[0], LinkLevel(0, 1e-3, 1e8), alone.levels[0], LinkLevel(0, 1e-3, 1e8)]
    for number, times in enumerate(plan.times[:-1]):
        link, num_bytes = by_rank[number % 4], sum(plan.sent_bytes(number))
        assert times.send_s == pytest.approx(link.latency_s + num_bytes / link.bandwidth_bytes_per_s)
        assert plan.times[number + 1].send_back_s == times.send_s
    assert plan.times[-1].send_s == plan.times[0].send_back_s == 0.0
    swept = stage_times(as_run(_blocks(model, point, slow), point.schedule), point.partition, transfers(slow, 4, 2))
    for planned, by_sweep in zip(plan.times, swept):
        assert (by_sweep.send_s, by_sweep.send_back_s) == pytest.approx((planned.send_s, planned.send_back_s), rel=0.02)


def _blocks(model: Model, point: Staged, cluster: Cluster) -> Blocks:
    asked = (point.plan,), point.schedule.num_microbatches, point.mesh, cluster, PlanRequest().training
    ((_, _, blocks),) = profiled(model, *asked)
    return blocks


def test_groups_of_the_same_devices_are_cut_like_one(graph) -> None:
    same = joined([(2, V100), (2, V100)], LINK)
    asked = PlanRequest(num_microbatches=4, schedule="1f1b")
    found, known = choose_plan(graph, MESH, same, asked), choose_plan(graph, MESH, V100, asked)
    assert found.starts == known.starts and found.step_s == pytest.approx(known.step_s, rel=1e-9)


def test_the_faster_group_has_more_layers_than_the_equal_cut(graph) -> None:
    asked = PlanRequest(num_microbatches=4, schedule="1f1b")
    plan = choose_plan(graph, MESH, CLUSTER, asked)
    equal = hand_plan_in_stages("ddp,pp=2", graph, MESH, CLUSTER, asked)
    assert plan.lower_bound_s < plan.step_s < equal.step_s
    assert len(plan.stages[0].graph.ops) > len(equal.stages[0].graph.ops)
    turned = choose_plan(graph, MESH, joined([(2, P100), (2, V100)]), asked)
    assert len(turned.stages[0].graph.ops) < len(equal.stages[0].graph.ops)
    again = StagedPlan.loads(plan.dumps(), graph, MESH, is_own=True)
    assert again.step_s == plan.step_s and again.cluster == CLUSTER
    assert "1 (p100)" in plan.explain() and "as fast as each is" in plan.explain()


def test_an_open_mesh_has_stages_where_the_link_between_groups_is_slow() -> None:
    example = example_of(Case("gpt2", "v100-25g", "8", 64, sequence=256, layers=8))
    slow = joined([(4, V100), (4, P100)], LinkLevel(0, 1e-5, 1e8))
    plan = choose_plan(graph_of(example), Devices(8), slow, PlanRequest(time_limit_s=60))
    assert isinstance(plan, StagedPlan) and plan.mesh.num_devices == 8 and plan.schedule.num_ranks > 1
    assert plan.step_s < choose_plan(graph_of(example), Mesh((8,), ("dp",)), slow).step_s


def test_ranks_of_the_pipeline_are_of_one_group(graph) -> None:
    uneven = joined([(3, V100), (1, P100)])
    with pytest.raises(MeshError, match="no whole number of ranks"):
        choose_plan(graph, MESH, uneven, PlanRequest(num_microbatches=4))
    with pytest.raises(MeshError, match="has 4 devices, the mesh is pp=2,dp=4"):
        choose_plan(graph, Mesh((2, 4), ("pp", "dp")), CLUSTER, PlanRequest(num_microbatches=4))


SLOW_FIRST = joined([(2, P100), (2, V100)], LinkLevel(0, 1e-5, 1e9))


def test_the_order_of_groups_along_the_stages_is_that_of_brute_force() -> None:
    graph = graph_of(example_of(Case("gpt2", "v100-25g", "8", 16, sequence=64, layers=8)))
    asked = PlanRequest(num_microbatches=4)
    as_given, turned = (choose_plan(graph, Devices(4), one, asked) for one in orders(SLOW_FIRST))
    plan = choose_plan(graph, Devices(4), SLOW_FIRST, replace(asked, any_order=True))
    assert turned.step_s < 0.95 * as_given.step_s  # in-flight activations and the update are on the first stage
    assert plan.step_s == pytest.approx(turned.step_s, rel=1e-9) and plan.cluster.name == "2 v100 + 2 p100"
    assert [stage.cluster for stage in plan.stages] == [V100, P100]
    chosen = choose_devices(graph, Devices(4), SLOW_FIRST, asked)
    assert chosen.step_s <= plan.step_s * (1 + 1e-9)
    kept = choose_devices(graph, MESH, SLOW_FIRST, asked)
    assert kept.cluster == SLOW_FIRST and kept.mesh == MESH
    best = choose_plan(graph, Devices(4), orders(SLOW_FIRST)[1], replace(asked, any_order=True))
    assert best.step_s == pytest.approx(turned.step_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_orders_of_three_groups_is_swept(graph, seed: int) -> None:
    draw = random.Random(seed)
    names = "abc"
    each = [
        replace(
            _with_memory(V100, draw.choice([500, 900, 4000])), name=name, flops_per_s=_slower(V100, draw), source=""
        )
        for name in names
    ]
    cluster, model = joined([(2, one) for one in each], LinkLevel(0, 1e-5, 1e9)), model_of(graph, fold(graph))
    request = PlanRequest(num_microbatches=4, schedule="1f1b").on(cluster)
    meshes = ((3, MESH_OF_RANK),)
    by_order = {one.name: sweep(model, meshes, one, request) for one in orders(cluster)}
    assert len(by_order) == 6 and by_order.keys() == {
        " + ".join(f"2 {name}" for name in order) for order in itertools.permutations(names)
    }
    best_s = min((points[0].step_s for points in by_order.values() if points), default=math.inf)
    found = sweep(model, meshes, cluster, replace(request, any_order=True))
    assert (best_s == math.inf) == (not found)
    if found:
        assert best_s <= found[0].step_s <= best_s / 0.99 * (1 + 1e-9)
        assert by_order[found[0].cluster.name][0].step_s == found[0].step_s
        assert found[0].cluster == cluster or best_s < 0.99 * min(
            (point.step_s for point in by_order[cluster.name]), default=math.inf
        )


def _slower(cluster: Cluster, draw: random.Random) -> dict[str, float]:
    factor = draw.uniform(0.3, 1.0)
    return {dtype: rate * factor for dtype, rate in cluster.flops_per_s.items()}


def test_a_plan_whose_groups_are_in_another_order_says_so_and_is_not_run_as_they_are(graph) -> None:
    turned = orders(SLOW_FIRST)[1]
    plan = choose_plan(graph, MESH, turned, PlanRequest(num_microbatches=4, schedule="1f1b"))
    text = plan.dumps()
    assert "in the order 2 v100 + 2 p100, not in that of 2 p100 + 2 v100" in plan.explain()
    again = StagedPlan.loads(text, graph, MESH, is_own=True)
    assert again.cluster == turned and again.step_s == plan.step_s
    with pytest.raises(
        PlanError, match=r"in the order 2 v100 . 2 p100, the ranks are those of 2 p100 . 2 v100: start the ranks in"
    ):
        check_order(text)
    with pytest.raises(PlanError, match="start the ranks"):
        _text_of(plan)  # as autopar.compile reads plan=
    as_given = choose_plan(graph, MESH, SLOW_FIRST, PlanRequest(num_microbatches=4, schedule="1f1b")).dumps()
    assert check_order(as_given) == as_given
