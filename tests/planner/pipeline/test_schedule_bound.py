"""The lower bound of a schedule on a mesh is below every plan with it, and near the best of them."""

import math
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.cluster.measured_terms import SharedCores
from autopar.costmodel.training import Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_mesh
from autopar.models.catalogue import build_model
from autopar.planner.budget import Budget
from autopar.planner.fit_memory import Fit, LimitedSearch
from autopar.planner.pipeline.schedule_bound import (
    ScheduleBounds,
    _busiest_s,
    _slowest_laid_out_s,
    _slowest_s,
    _work,
    schedule_bound_s,
)
from autopar.planner.pipeline.search_pipeline import _is_slower, model_in_stages, plan_in_stages
from autopar.planner.problem import Setting
from autopar.planner.request import PlanRequest
from autopar.sbp.analysis.sample_blocks import fold_microbatch
from autopar.sbp.microbatch.microbatch_graph import microbatched
from autopar.schedule.orders import Schedule
from tests.planner.pipeline.test_search_pipeline import V100, Graph, as_written, gpt, points, request

__all__ = ["gpt"]


def bound_s(graph: Graph, mesh: str, schedule: Schedule, limit: float = float("inf"), cluster: Cluster = V100) -> float:
    model, _ = points(graph, parse_mesh(mesh))
    micro = microbatched(model.graph, schedule.num_microbatches)
    starts = [model.graph.ops[at].name for at in model.starts[1:]]
    at = parse_mesh(mesh.removeprefix(f"pp={schedule.num_ranks},"))
    setting = Setting(micro.graph, at, cluster, request(limit), Budget.of(100.0))
    return schedule_bound_s(setting, fold_microbatch(model.folded, micro), starts, schedule)


def test_no_plan_by_hand_takes_less_and_the_best_is_near(gpt: Graph) -> None:
    mesh, asked = "pp=2,dp=2,tp=2", {"num_microbatches": 8}
    model, found = points(gpt, parse_mesh(mesh), asked=asked)
    fastest: dict[Schedule, float] = {}
    for point in found:
        fastest[point.schedule] = min(fastest.get(point.schedule, math.inf), as_written(model, point, gpt).step_s)
    assert {schedule.name for schedule in fastest} == {"1f1b", "interleaved", "zero-bubble"}
    for schedule, step_s in fastest.items():
        assert bound_s(gpt, mesh, schedule) <= step_s, schedule
    wanted = request(**asked, schedule="zero-bubble")
    plan = plan_in_stages(gpt, parse_mesh(mesh), V100, wanted, budget=Budget.of(60.0))
    least_s = bound_s(gpt, mesh, plan.schedule)
    assert 0.95 * plan.step_s <= least_s <= plan.step_s
    assert plan.lower_bound_s == pytest.approx(least_s) and "with this schedule on this mesh" in plan.bound_of
    assert f"no {plan.bound_of} takes less than" in plan.explain()


@pytest.mark.parametrize("speedup", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("mesh", ["pp=2,dp=2,tp=2", "pp=4"])
def test_no_plan_takes_less_where_ranks_share_cores(gpt: Graph, mesh: str, speedup: float) -> None:
    cluster, asked = replace(V100, shared_cores=SharedCores(8, speedup)), {"num_microbatches": 8}
    model, found = points(gpt, parse_mesh(mesh), asked=asked)
    fastest, bounds = dict[Schedule, float](), dict[Schedule, float]()
    for point in found:
        plan = as_written(model, point, gpt)
        step_s = replace(plan, cluster=cluster).step_s
        assert step_s < plan.step_s, "one computes faster while others wait"
        fastest[point.schedule] = min(fastest.get(point.schedule, math.inf), step_s)
    for schedule, step_s in fastest.items():
        bounds[schedule] = bound_s(gpt, mesh.replace("pp=4", "pp=4,dp=1"), schedule, cluster=cluster)
        assert bounds[schedule] <= step_s, schedule
    least_known = 0.9 if mesh == "pp=4" else 0.5  # collectives go on beside the others' computing
    assert max(bounds[schedule] / step_s for schedule, step_s in fastest.items()) >= least_known


def test_the_slowest_rank_of_any_plan_takes_what_its_blocks_do_with_their_conversions() -> None:
    """Blocks of two kinds on a slow network, where conversions take long: the work of a block says little."""
    example = build_model("t5-large", layers=8, batch=16)
    graph, mesh = trace(skeleton(example.model), example.args, dict(example.kwargs)), parse_mesh("pp=4,tp=8")
    model, found = points(graph, mesh, asked={"num_microbatches": 8})
    least: dict[Schedule, float] = {}
    for point in found:
        if point.schedule not in least:
            micro = microbatched(model.graph, point.schedule.num_microbatches)
            training = Training().staged(point.schedule.num_microbatches, point.schedule.num_ranks)
            setting = Setting(micro.graph, point.mesh, V100, replace(request(), training=training), Budget.of(100.0))
            folded = fold_microbatch(model.folded, micro)
            given = segmented(folded, micro.graph, ends_apart(folded)), model.block_names
            work, blocks_s = _work(setting, given[1], point.schedule)
            least[point.schedule] = _slowest_laid_out_s(setting, *given, blocks_s, point.schedule)
            assert least[point.schedule] > 1.05 * work.slowest_s
        plan = as_written(model, point, graph)
        each = [one.costs.microbatch_s("forward") + one.costs.microbatch_s("backward") for one in plan.stages]
        busiest = max(sum(each[stage] for stage in plan.schedule.stages_of(rank)) for rank in range(4))
        assert least[point.schedule] <= busiest * (1 + 1e-9), point.name


def test_of_microbatches_without_stages_it_is_nearly_exact(gpt: Graph) -> None:
    schedule = Schedule("accumulate", 1, 1, 4)
    free_s = bound_s(gpt, "dp=2,tp=2", schedule)
    plan = plan_in_stages(
        gpt, parse_mesh("dp=2,tp=2"), V100, request(num_microbatches=4, schedule="accumulate"), budget=Budget.of(60.0)
    )
    assert plan.schedule == schedule
    assert 0.98 * plan.step_s <= free_s <= plan.step_s


@pytest.mark.parametrize("mesh", ["dp=4", "pp=2,dp=2"])
def test_reductions_beside_the_last_backward_are_not_in_it(gpt: Graph, mesh: str) -> None:
    cluster = replace(V100, overlap=1.0)
    schedule = Schedule("accumulate", 1, 1, 2) if mesh == "dp=4" else Schedule("1f1b", 2, 2, 2)
    wanted = request(num_microbatches=2, schedule=schedule.name)
    plan = plan_in_stages(gpt, parse_mesh(mesh), cluster, wanted, budget=Budget.of(60.0))
    assert plan.schedule == schedule and any(stage.costs.hidden_s > 0 for stage in plan.stages)
    assert 0.8 * plan.step_s <= bound_s(gpt, mesh, schedule, cluster=cluster) <= plan.step_s


@pytest.mark.parametrize("name", ["gpt2", "t5-large", "vgg13", "vit-l"])
def test_what_one_pass_takes_at_least_holds_for_any_number_of_microbatches(name: str) -> None:
    sizes = {"batch": 64} if name == "vgg13" else {"batch": 64, "layers": 2}
    example = build_model(name, **sizes)
    graph = trace(skeleton(example.model), example.args, dict(example.kwargs))
    for where, kind in (("dp=4", "v100"), ("dp=2,tp=2", "p100"), ("dp=8", "h100")):
        mesh, cluster = parse_mesh(where), load_cluster(kind)
        model = model_in_stages(graph, mesh, request())
        bounds = ScheduleBounds(model.graph, model.folded, model.block_names, cluster, PlanRequest().on(cluster))
        least_s = bounds.one_pass_s(mesh, Budget.of(100.0))
        assert least_s > 0 == replace(bounds, cluster=replace(cluster, overlap=0.5)).one_pass_s(mesh, Budget.of(100.0))
        for count in (2, 8):
            schedule = Schedule("accumulate", 1, 1, count)
            assert least_s <= bounds.least_s(mesh, schedule, Budget.of(100.0)), (where, count)


def test_without_time_the_bound_is_that_of_the_work(gpt: Graph) -> None:
    plan = plan_in_stages(gpt, parse_mesh("pp=2,dp=2,tp=2"), V100, request(), budget=Budget.of(0.0))
    assert plan.bound_of == "plan" and 0 < plan.lower_bound_s < plan.step_s


def test_the_slowest_stage_is_that_of_the_best_cut() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        times = draw.uniform(0.1, 2.0, draw.integers(3, 8))
        num_stages = int(draw.integers(1, len(times)))
        cuts = combinations(range(1, len(times)), num_stages - 1)
        best = min(max(times[a:b].sum() for a, b in pairwise((0, *cut, len(times)))) for cut in cuts)
        assert _slowest_s(times, num_stages) == pytest.approx(best)


def waiting(step_s: float, mesh: Mesh, schedule: Any) -> Fit[Any]:
    """A fit in which a plan of the schedule waits."""
    fit: Fit[Any] = Fit(math.inf, None, Budget.of(100.0))
    fit.add(
        LimitedSearch((math.inf,)),
        SimpleNamespace(step_s=step_s, schedule=schedule, stages=[SimpleNamespace(mesh=mesh)]),
    )
    return fit


def test_a_point_that_cannot_win_is_left_and_waits_with_its_bound(gpt: Graph) -> None:
    mesh = parse_mesh("pp=2,dp=2,tp=2")
    model, found = points(gpt, mesh, asked={"num_microbatches": 8, "schedule": "1f1b"})
    point = found[0]
    least_s = bound_s(gpt, str(mesh), point.schedule)
    for to_beat_s, cutoff_s, is_left, num_waiting in (
        (0.99 * least_s, math.inf, True, 2),  # searched if the faster plan does not fit
        (math.inf, 0.99 * least_s, True, 1),  # never searched
        (point.step_s, math.inf, False, 1),
    ):
        bounds = ScheduleBounds(model.graph, model.folded, model.block_names, V100, request())
        fit = waiting(to_beat_s, point.mesh, SimpleNamespace(num_ranks=1))
        assert _is_slower(fit, point, found, bounds, cutoff_s) == is_left
        assert len(fit.waiting) == num_waiting
        if num_waiting == 2:
            left = fit.waiting[-1]
            assert left.source is point and left.plan is None
            assert to_beat_s <= left.at_least_s <= least_s * (1 + 1e-9)


def test_points_whose_bound_is_not_expected_to_tell_are_searched_without_it(gpt: Graph) -> None:
    model, found = points(gpt, parse_mesh("pp=2,dp=2,tp=2"), asked={"num_microbatches": 8, "schedule": "1f1b"})
    point, asked = found[0], list[float]()

    class Bounds(ScheduleBounds):
        def least_s(self, *key: Any) -> float:
            asked.append(key[3] if len(key) > 3 else math.inf)
            return 0.9 * point.step_s

    bounds = Bounds(model.graph, model.folded, model.block_names, V100, request())
    for step_s, is_asked in ((0.95, False), (0.8, True)):
        fit = waiting(step_s * point.step_s, point.mesh, point.schedule)
        asked.clear()
        assert _is_slower(fit, point, found, bounds, math.inf) == is_asked
        assert asked == [math.inf, *([step_s * point.step_s] if is_asked else [])]  # the first is that of the best


def test_the_busiest_rank_is_that_of_the_best_cut_into_several_stages_a_rank() -> None:
    draw, num_exact = np.random.default_rng(0), 0
    for _ in range(100):
        times = np.ones(int(draw.integers(4, 11)))
        unlike = draw.permutation(len(times))[: draw.integers(0, 4)]
        times[unlike] = draw.uniform(0.1, 3.0, len(unlike))
        cuts = ((0, *cut, len(times)) for cut in combinations(range(1, len(times)), 3))
        stages = (np.array([times[a:b].sum() for a, b in pairwise(cut)]) for cut in cuts)
        best, least_s = min(max(one[::2].sum(), one[1::2].sum()) for one in stages), _busiest_s(times, 2)
        assert least_s <= best + 1e-9, times
        num_exact += least_s >= best - 1e-9
    assert num_exact >= 40
    # 80 layers and a head on 8 ranks: one has 11
    assert _busiest_s(np.array([0.1, *[1.0] * 80, 1.1]), 8) == pytest.approx(11.0)
