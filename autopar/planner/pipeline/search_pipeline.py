"""`plan_in_stages`: the best plan with stages and microbatches, by a sweep of hand plans and a search of the best."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import rank_limits
from autopar.costmodel.work_bound import floor_s, speeds_floor_s
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.passes.keep_loss import loss_only
from autopar.mesh import PIPELINE, Devices, Mesh
from autopar.planner.budget import Budget
from autopar.planner.fit_memory import Fit, LimitedSearch, Predict
from autopar.planner.groups_in_microbatches import check_groups
from autopar.planner.layouts.mesh_shapes import most_tensor
from autopar.planner.pipeline.boundary_layouts import OpenStages, choose_crossing
from autopar.planner.pipeline.cut_stages import crossing_layouts, cut_as
from autopar.planner.pipeline.hand_points import Model, grids, model_of
from autopar.planner.pipeline.infeasible import search_lightest
from autopar.planner.pipeline.schedule_bound import ScheduleBounds
from autopar.planner.pipeline.search_stages import PointSearch, searched
from autopar.planner.pipeline.stage_tables import CutTask, StageCache
from autopar.planner.pipeline.sweep import Staged, sweep
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import StagedPlan, sub_mesh, without_stages
from autopar.sbp.microbatch.microbatch_graph import microbatched

# The most points of the sweep that are searched, if they are nearly as fast as the best: the search gains about the
# same on each.
_MOST_POINTS, _NEAR = 3, 1.05
# The factor by which the search makes a point of the sweep faster at most, as a rule.
_GAIN = 1.5
# A point up to this multiple of the memory limit, without its optimizer state, may be made to fit by the search.
_NEARLY = 1.25
# The number of points of the sweep that a plan shows for comparison.
_MOST_SHOWN = 8
# Shares of the time left: for the sweep, for a bound, and for the search of a point.
_SHARE_OF_SWEEP, _SHARE_OF_BOUND, _SHARE_OF_POINT = 0.4, 0.1, 0.9
# If the predicted peak of no searched point fits, the sweep is repeated under a limit lowered by this factor; after the
# deadline, by the excess of the first peak over its estimate, which is surely enough.
_MOST_SWEEPS, _LOWERED = 3, 0.85


def model_in_stages(graph: Graph, mesh: Mesh | Devices, request: PlanRequest) -> Model:
    """The model for the sweep on `mesh`, with what is known of it from planning `graph` before; MicrobatchError if the
    batch cannot be cut as requested.
    """
    training_graph = graph.once(loss_only)
    if request.num_microbatches is not None:
        microbatched(training_graph, request.num_microbatches)  # raises the error with the reason
    num_stages = mesh.shape[0] if isinstance(mesh, Mesh) and PIPELINE in mesh.axis_names else 1
    models = training_graph.once(_models)
    if num_stages not in models:
        models[num_stages] = model_of(training_graph, fold(training_graph), num_stages=num_stages)
    return models[num_stages]


def _models(_: Graph) -> dict[int, Model]:
    """The models made so far, by the number of their stages."""
    return {}


def sweep_stages(
    model: Model, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest, budget: Budget
) -> list[Staged]:
    """The points of the sweep that fit within the memory limit of `request`, fastest first.

    On an open mesh every grid of so many devices is tried; the sweep takes at most a share of the `budget`.
    """
    meshes = tuple(_meshes(mesh, cluster, model))
    with budget.timed("stages by hand"):
        is_open = isinstance(mesh, Devices) and cluster.groups is None
        deadline = budget.part(_SHARE_OF_SWEEP).deadline
        points = sweep(model, meshes, cluster, request, deadline=deadline, is_open=is_open)
    budget.show("stages by hand", tuple(points))
    return points


def _meshes(mesh: Mesh | Devices, cluster: Cluster, model: Model) -> Iterator[tuple[int, Mesh]]:
    if cluster.groups is not None:
        check_groups(mesh, cluster)
    if isinstance(mesh, Devices):
        if cluster.groups is not None:  # each rank of the pipeline has devices of one group
            counts = [count for count, _ in cluster.groups.members]
            offered = grids(mesh.num_devices, cluster, num_layers=len(model.starts), most_tensor=min(counts))
            yield from ((num, own) for num, own in offered if num > 1 and not any(x % own.num_devices for x in counts))
            return
        most: dict[str, int] = {"num_layers": len(model.starts), "most_tensor": most_tensor(mesh.num_devices, cluster)}
        yield from grids(mesh.num_devices, cluster, **most, num_experts=model.outline.num_experts)
        return
    if PIPELINE not in mesh.axis_names:
        yield 1, mesh
        return
    yield mesh.shape[0], sub_mesh(mesh)


@dataclass(frozen=True)
class WithoutStages:
    """The outcome of planning without stages and microbatches: `step_s` of the plan, `inf` if there is none.

    `is_searched`: whether that was a search of this mesh to its end, so that its plans need not be searched again.
    `is_beaten`: whether `step_s` is of a plan on other devices, which the one without stages does not beat.
    """

    step_s: float = math.inf
    is_searched: bool = False
    is_beaten: bool = False

    @classmethod
    def of(cls, plan: Plan | StagedPlan | None, to_beat_s: float, *, is_searched: bool) -> "WithoutStages":
        """The outcome `plan`, where one on other devices takes `to_beat_s`."""
        step_s = math.inf if plan is None else plan.step_s
        return cls(min(step_s, to_beat_s), is_searched=is_searched, is_beaten=to_beat_s < step_s < math.inf)


def plan_in_stages(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest,
    *,
    budget: Budget,
    whole: WithoutStages = WithoutStages(),
    share: float = 1.0,
    predict: Predict | None = None,
) -> Plan | StagedPlan | None:
    """The best plan with stages, microbatches or activation checkpointing; None if no point comes near that of `whole`.

    It is never slower than the best point of the sweep that fits by its estimate. If no plan fits by the deadline and
    `whole` has none, a few points are tried after it, since a late plan is better than none. InfeasibleError,
    with the least memory that would do, if none fits. `share`: of the time left for the search of points, if one
    without stages and microbatches comes near, for which the caller needs the rest. `predict`: as in `choose_plan`.
    """
    whole_budget, budget = budget, budget.part(1 - _SHARE_OF_BOUND)
    fit = Fit[StagedPlan](request.limit_bytes, predict, budget)
    by_hand, refused = list[Staged](), None
    model = model_in_stages(graph, mesh, request)
    meshes = tuple(_meshes(mesh, cluster, model))
    bounds = ScheduleBounds(model.graph, model.folded, model.block_names, cluster, request)
    if _are_slower(meshes, bounds, whole, budget):
        return None
    for number in range(_MOST_SWEEPS):
        if number and budget.is_spent and whole.step_s < math.inf:
            break
        lowered = min(_LOWERED, fit.least_ratio) if budget.is_spent else _LOWERED
        within = replace(request, memory_share=lowered**number)
        by_hand = sweep_stages(model, mesh, cluster, within, budget)
        budget = fit.budget = _left_for_points(by_hand, budget, share)
        points = _to_search(by_hand, model, mesh, cluster, within, budget, whole.step_s)
        if by_hand and not points:
            return None
        search_point = partial(_search_point, fit, model=model, graph=graph, request=within, whole=whole, bounds=bounds)
        for point in points:
            if not _is_slower(fit, point, points, bounds, whole.step_s):
                search_point(point)
        if not fit.waiting and not number:
            if whole.step_s < math.inf:
                return None
            refused = search_lightest(fit, model, meshes, cluster, request, search_point)
        _add_next(fit, by_hand, points, whole.step_s)
        for search in fit.searches():
            # a point that was left because of its bound, or of faster ones, is searched for the first time
            search_point(search.source) if isinstance(search.source, Staged) else _search_again(fit, search)
        if fit.best is not None or refused is not None:
            break
    if fit.best is None:
        ended = f" (planning was ended by {budget.ended_by})" if budget.is_spent else ""
        raise refused or fit.refusal(f"so would those with less{ended}; raise it, or use more devices")
    ended = f", ended by {budget.ended_by}" if budget.is_spent else ""  # before the bound is computed in the rest
    best = _bounded(fit.best, bounds, model, whole_budget)
    best = replace(best, found_by=best.found_by + ended, hand=_shown(by_hand, best.cluster), timings=budget.timings)
    return without_stages(best, graph) if best.schedule.num_ranks == best.schedule.num_microbatches == 1 else best


def _are_slower(
    meshes: Sequence[tuple[int, Mesh]], bounds: ScheduleBounds, whole: WithoutStages, budget: Budget
) -> bool:
    """Whether the plan to beat is on other devices, and none on one rank takes less in any number of microbatches."""
    return whole.is_beaten and all(n == 1 and bounds.one_pass_s(one, budget) >= whole.step_s for n, one in meshes)


def _is_slower(
    fit: Fit[StagedPlan], point: Staged, points: Sequence[Staged], bounds: ScheduleBounds, cutoff_s: float
) -> bool:
    """Whether no plan with the schedule of `point` on its mesh beats the plans so far, or takes less than `cutoff_s`;
    once the budget is spent, whether the point itself does not. `points`: all of the sweep that may be searched.

    If none beats the plans, the point waits in `fit` with its bound: it is searched if no faster plan fits. Points with
    one rank are not asked: their search begins with what would be their bound. Nor are those whose bound is not
    expected to exceed the plans: it takes half as long as the search.
    """
    to_beat_s = min(fit.to_beat_s, cutoff_s)
    if fit.budget.is_spent:
        return bool(fit.waiting) and point.step_s >= fit.to_beat_s
    if point.schedule.num_ranks == 1 or math.isinf(to_beat_s) or bounds.cluster.groups is not None:
        return False
    part = fit.budget.part(_SHARE_OF_BOUND)
    if point.step_s * _bound_share(fit, points, bounds, part) < to_beat_s:
        return False
    least_s = bounds.least_s(point.mesh, point.schedule, part, to_beat_s)
    if to_beat_s <= least_s < cutoff_s:
        fit.add(LimitedSearch(_limits(fit, point), source=point), None, least_s)
    return least_s >= to_beat_s


def _add_next(fit: Fit[StagedPlan], by_hand: Sequence[Staged], points: Sequence[Staged], cutoff_s: float) -> None:
    """Let the points that follow those searched wait in `fit`: each is searched as soon as no plan that fits takes less
    than it does by hand.
    """
    known = {(one.mesh, one.schedule) for one in points}
    behind = {(one.mesh, one.schedule): one for one in reversed(by_hand)}
    others = sorted((one for key, one in behind.items() if key not in known), key=lambda one: one.step_s)
    for point in others[:_MOST_POINTS]:
        if point.step_s < cutoff_s:
            fit.add(LimitedSearch(_limits(fit, point), source=point), None, point.step_s)


def _limits(fit: Fit[StagedPlan], point: Staged) -> tuple[float, ...]:
    return rank_limits(fit.limit_bytes, point.cluster, point.schedule.num_ranks)


def _bound_share(fit: Fit[StagedPlan], points: Sequence[Staged], bounds: ScheduleBounds, budget: Budget) -> float:
    """The bound of the fastest plan so far, which it needs at the end too, over the step of its point in the sweep."""
    plans = (search.plan for search in fit.waiting if search.plan is not None)
    best = min(plans, key=lambda plan: plan.step_s, default=None)
    if best is None or best.schedule.num_ranks == 1:
        return 1.0
    mesh, schedule = best.stages[0].mesh, best.schedule
    by_hand = next((one for one in points if (one.mesh, one.schedule) == (mesh, schedule)), None)
    return 1.0 if by_hand is None else bounds.least_s(mesh, schedule, budget) / by_hand.step_s


def _bounded(plan: StagedPlan, bounds: ScheduleBounds, model: Model, budget: Budget) -> StagedPlan:
    """The plan with a lower bound: of all plans with its schedule on its mesh or, without time for that, of all."""
    schedule, request = plan.schedule, bounds.request
    if plan.cluster.groups is not None:
        floor = speeds_floor_s(model.graph, plan.cluster.groups, request.training)
        return replace(plan, lower_bound_s=min(floor, plan.step_s), bound_of="plan on these devices")
    floor = floor_s(model.graph, plan.mesh, plan.cluster, training=request.training)
    bound_s = bounds.least_s(plan.stages[0].mesh, schedule, budget)
    is_plain = schedule.num_ranks == schedule.num_microbatches == 1
    kind = "plan" if is_plain else "plan with this schedule on this mesh"
    bound_of = f"{kind} whose inner layers are alike" if model.folded.repeats else kind
    if bound_s <= floor:
        bound_s, bound_of = floor, "plan"
    return replace(plan, lower_bound_s=min(bound_s, plan.step_s), bound_of=bound_of)


def _above_limit(
    model: Model, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest, budget: Budget
) -> list[Staged]:
    """The points of the sweep under relaxed requests, which seed the search though they do not fit.

    Without optimizer state, the search of each stage finds how much of it must be offloaded; under a higher limit, the
    search may make a point fit that nearly does.
    """
    points: list[Staged] = []
    if cluster.host_bandwidth_bytes_per_s and request.training.has_state:
        training = replace(request.training, optimizer="none")
        for factor in (1.0, _NEARLY):
            lighter = replace(request, training=training, memory_share=factor * request.memory_share)
            points = points or sweep_stages(model, mesh, cluster, lighter, budget)
    return points


def _search_point(
    fit: Fit[StagedPlan],
    point: Staged,
    model: Model,
    graph: Graph,
    request: PlanRequest,
    whole: WithoutStages,
    bounds: ScheduleBounds,
) -> None:
    """Add the search of a point, with its plan if there is one that takes less than that of `whole`.

    A point with one rank, whose stages are the whole step, is left as soon as it cannot beat the others so far. If it
    saves no memory, planning without stages may have searched it already. A search gets a large share of the time left;
    the rest is for plans whose peak does not fit, which are searched again.
    """
    is_alone = point.schedule.num_ranks == 1
    is_known = whole.is_searched and is_alone and point.schedule.num_microbatches == 1
    if is_known and not any(point.partition.num_recomputed) and whole.step_s <= point.step_s:
        return
    cluster, part = point.cluster, fit.budget.part(_SHARE_OF_POINT, where=f"{point.schedule} of {point.mesh}: ")
    cut = cut_as(model, point)
    part.show("stages", cut)
    opened = OpenStages(cut, point, point.mesh, cluster, request, part)
    by_hand, chosen = crossing_layouts(cut), choose_crossing(opened)
    crossings = [by_hand] + [chosen] * (chosen != by_hand)
    to_beat_s = min(whole.step_s, fit.to_beat_s) if is_alone else math.inf
    offloading, keeping = (
        tuple(
            (CutTask(cut, point, point.mesh, cluster, request, crossing, opened, moves, is_known), StageCache())
            for crossing in crossings
        )
        for moves in (True, False)
    )
    searches = PointSearch(graph, offloading, keeping)
    limits_bytes = request.rank_limits(cluster, point.schedule.num_ranks)
    plan, at_least_s = searched(searches, limits_bytes, part, to_beat_s)
    if is_alone and (least_s := offloading[0][1].least_s):
        bounds.learn(point.mesh, point.schedule, least_s)
    # the time was up, or the best plan of each stage is not the best for the pipeline
    if point.step_s < to_beat_s and (plan is None or (plan.step_s > point.step_s and plan.found_by == "search")):
        written = CutTask(cut, point, point.mesh, cluster, request, by_hand, opened), StageCache()
        plans = [plan, searched(PointSearch(graph, (written,)), limits_bytes, part.part(0.0))[0]]
        plan = min((one for one in plans if one is not None), key=lambda one: one.step_s, default=None)
    search = LimitedSearch(_limits(fit, point), source=searches)
    if (at_least_s if plan is None else plan.step_s) < whole.step_s:
        fit.add(search, plan, at_least_s)


def _search_again(fit: Fit[StagedPlan], search: LimitedSearch[StagedPlan]) -> None:
    """Make a search under other limits, or for slower plans than before, while there is time."""
    to_beat_s = fit.to_beat_s if len(search.allowed_bytes) == 1 else math.inf
    if not fit.budget.is_spent:
        fit.add(search, *searched(search.source, search.allowed_bytes, fit.budget, to_beat_s))


def _to_search(
    by_hand: list[Staged],
    model: Model,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest,
    budget: Budget,
    cutoff_s: float,
) -> list[Staged]:
    """The points to be searched, of those that fit `by_hand`, else of some that nearly do.

    Searched plans take less memory than hand plans, whose cut leaves that of a group with little unused: where groups
    have limits that differ, the cuts for the least of them are searched besides.
    """
    points = _worth_searching(by_hand or _above_limit(model, mesh, cluster, request, budget), cutoff_s)
    least = request.on_least(cluster)
    if not by_hand or least.limit_bytes >= request.limit_bytes or budget.is_spent:
        return points
    known = {(one.mesh, one.schedule, one.partition.starts, one.cluster.name) for one in points}
    others = _worth_searching(sweep_stages(model, mesh, cluster, least, budget), cutoff_s)
    keys = ((one.mesh, one.schedule, one.partition.starts, one.cluster.name) for one in others)
    return points + [one for one, key in zip(others, keys) if key not in known]


def _worth_searching(points: Sequence[Staged], cutoff_s: float) -> list[Staged]:
    """The best point of each depth, mesh, schedule and number of microbatches; the search finds the flavour.

    Those that recompute nothing come first: theirs is one search each, and ends the several of others early. On one
    rank so do those of the fewest microbatches: without a memory limit each microbatch more takes longer, so that the
    searches behind have the higher lower bounds.
    """
    distinct: dict[tuple, Staged] = {}
    for point in points:
        distinct.setdefault((point.mesh, point.schedule), point)
    limit_s = min(min((one.step_s for one in points), default=0.0) * _NEAR, cutoff_s * _GAIN)
    near = [point for point in distinct.values() if point.step_s <= limit_s][:_MOST_POINTS]
    return sorted(near, key=_search_order)


def _search_order(point: Staged) -> tuple[bool, int]:
    schedule = point.schedule
    return any(point.partition.num_recomputed), schedule.num_microbatches if schedule.num_ranks == 1 else 0


def _left_for_points(points: Sequence[Staged], budget: Budget, share: float) -> Budget:
    """`share` of the time left if the search may make a point without stages and microbatches as fast as the best,
    else all of it.
    """
    whole = (one for one in points if one.schedule.num_ranks == one.schedule.num_microbatches == 1)
    return budget.part(share if any(one.step_s <= _GAIN * points[0].step_s for one in whole) else 1.0)


def _shown(points: Sequence[Staged], cluster: Cluster) -> dict[str, HandCosts]:
    """The first points with the groups of devices in the order of `cluster`, and the first of each other order."""
    others = {point.cluster.name: point for point in reversed(points) if point.cluster != cluster}
    named = [(point.name, point) for point in points if point.cluster == cluster][:_MOST_SHOWN]
    named += [(f"{point.name} on {name}", point) for name, point in others.items()]
    return {name: HandCosts(point.step_s, round(max(point.rank_bytes))) for name, point in named}
