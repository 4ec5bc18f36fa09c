"""Stages on groups of devices that differ: the cut by each group's own speed."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel.cluster.device_groups import joined
from autopar.costmodel.cluster.load_cluster import LinkLevel, load_cluster
from autopar.errors import MeshError
from autopar.ir.folding.fold import fold
from autopar.ir.passes.keep_loss import loss_only
from autopar.mesh import Devices, Mesh
from autopar.planner.choose import choose_plan
from autopar.planner.pipeline.hand_points import model_of
from autopar.planner.pipeline.partition import partition
from autopar.planner.pipeline.stage_times import in_flight, stage_times, waiting
from autopar.planner.pipeline.sweep import as_run, sweep
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages, plan_by_hand
from autopar.plans.staged_plan import StagedPlan
from autopar.schedule.orders import Schedule
from bench.problem import example_of, graph_of
from bench.suite import Case
from tests.planner.pipeline.test_partition import _random_blocks

V100, P100 = load_cluster("v100"), load_cluster("p100")
LINK = LinkLevel(0, V100.levels[0].latency_s, V100.levels[0].bandwidth_bytes_per_s)
CLUSTER = joined([(2, V100), (2, P100)])
MESH = Mesh((2, 2), ("pp", "dp"))


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
    times = stage_times(own, found, (0.0, float("inf")))
    assert [x.forward_s + x.backward_s + x.weight_s for x in times] == pytest.approx(list(found.times_s))


def test_a_point_of_the_sweep_is_its_stages_each_on_its_own_devices(graph) -> None:
    model, request = model_of(graph, fold(graph), num_stages=2), PlanRequest()
    asked = {"training": request.training, "limit_bytes": 1e12, "num_microbatches": (4,), "schedules": ("1f1b",)}
    point = sweep(model, ((2, Mesh((2,), ("dp",))),), CLUSTER, **asked)[0]
    plan = plan_by_hand(model, point, CLUSTER, request.training)
    assert [stage.cluster for stage in plan.stages] == [V100, P100]
    assert plan.step_s == pytest.approx(point.step_s, rel=0.02)


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
