"""`plan_in_stages`: the best plan with stages and microbatches, by a sweep of hand plans and a search of the best."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.work_bound import floor_s
from autopar.errors import InfeasibleError, MeshError
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph, Value
from autopar.ir.passes.keep_loss import loss_only
from autopar.mesh import Devices, Mesh
from autopar.planner.budget import Budget
from autopar.planner.fit_memory import Candidate, Predict, Recorded, above_estimate, best_fitting
from autopar.planner.pipeline.boundary_layouts import choose_crossing
from autopar.planner.pipeline.cut_stages import crossing_layouts, cut_as
from autopar.planner.pipeline.hand_points import Model, grids, model_of
from autopar.planner.pipeline.infeasible import refusal
from autopar.planner.pipeline.search_rank import CutTask, StageCache
from autopar.planner.pipeline.search_stages import solve_stages
from autopar.planner.pipeline.sweep import SCHEDULES, Staged, sweep
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import PIPELINE, StagedPlan, sub_mesh
from autopar.sbp.assignment import produced_layouts
from autopar.sbp.microbatch.microbatch_graph import microbatched
from autopar.sbp.placement import I

Searches = Sequence[tuple[CutTask, StageCache]]  # each with other boundary layouts

# The most points of the sweep that are searched, if they are nearly as fast as the best: the search gains about the
# same on each.
_MOST_POINTS, _NEAR = 3, 1.05
# The factor by which the search makes a point of the sweep faster at most, as a rule.
_GAIN = 1.5
# A point up to this multiple of the memory limit, without its optimizer state, may be made to fit by the search.
_NEARLY = 1.25
# The number of points of the sweep that a plan shows for comparison.
_MOST_SHOWN = 8
# Shares of the time left: for the sweep, and for the search of a point.
_SHARE_OF_SWEEP, _SHARE_OF_POINT = 0.4, 0.9
# Tensor-parallel degrees beyond this many nodes are not tried.
_MOST_NODES = 2
# If the predicted peak of no searched point fits, the sweep is repeated under a limit lowered by this factor; after the
# deadline, by the excess of the first peak over its estimate, which is surely enough.
_MOST_SWEEPS, _LOWERED = 3, 0.85


def model_in_stages(graph: Graph, request: PlanRequest) -> Model:
    """The model for the sweep; MicrobatchError if the batch cannot be cut as requested."""
    training_graph = loss_only(graph)
    if request.num_microbatches is not None:
        microbatched(training_graph, request.num_microbatches)  # raises the error with the reason
    return model_of(training_graph, fold(training_graph))


def sweep_stages(
    model: Model, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest, budget: Budget
) -> list[Staged]:
    """The points of the sweep that fit, fastest first; MeshError for a pipeline axis that is not the first."""
    meshes = tuple(_meshes(mesh, cluster, len(model.starts)))
    schedules = SCHEDULES if request.schedule is None else (request.schedule,)
    counts = () if request.num_microbatches is None else (request.num_microbatches,)
    found = budget.run(
        "stages by hand",
        lambda: sweep(
            model,
            meshes,
            cluster,
            training=request.training,
            limit_bytes=request.limit_bytes,
            num_microbatches=counts,
            schedules=schedules,
            deadline=budget.part(_SHARE_OF_SWEEP).deadline,
        ),
    )
    budget.show("stages by hand", tuple(found))
    return found


def _meshes(mesh: Mesh | Devices, cluster: Cluster, num_blocks: int) -> Iterator[tuple[int, Mesh]]:
    if isinstance(mesh, Devices):
        most = _MOST_NODES * (cluster.levels[0].size or mesh.num_devices)
        yield from grids(mesh.num_devices, cluster, num_layers=num_blocks, most_tensor=most)
        return
    if PIPELINE not in mesh.axis_names:
        yield 1, mesh
        return
    if mesh.axis_names[0] != PIPELINE:
        raise MeshError(
            f"mesh {mesh}: stages lie along the outermost axis; write"
            f" {PIPELINE}={mesh.shape[mesh.axis_index(PIPELINE)]} first"
        )
    yield mesh.shape[0], sub_mesh(mesh)


def plan_in_stages(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest,
    *,
    budget: Budget,
    cutoff_s: float = math.inf,
    predict: Predict | None = None,
) -> Plan | StagedPlan | None:
    """The best plan with stages, microbatches or activation checkpointing; None if no point comes near `cutoff_s`.

    It is never slower than the best point of the sweep that fits by its estimate. If no plan fits by the deadline and
    there is no `cutoff_s`, a few points are tried after it, since a late plan is better than none. InfeasibleError,
    with the least memory that would do, if none fits. `predict`: as in `choose_plan`.
    """
    best, recorded, limit_bytes = None, Recorded(predict), request.limit_bytes
    by_hand: list[Staged] = []
    model = model_in_stages(graph, request)
    for number in range(_MOST_SWEEPS):
        if number and budget.is_spent and cutoff_s < math.inf:
            break
        factor = min(_LOWERED, recorded.least_ratio) if budget.is_spent else _LOWERED
        within = replace(request, memory_limit_bytes=limit_bytes * factor**number)
        by_hand = sweep_stages(model, mesh, cluster, within, budget)
        found = by_hand
        for lighter in _lighter(within, cluster):
            found = found or sweep_stages(model, mesh, cluster, lighter, budget)
        points = _worth_searching(found, cutoff_s)
        if by_hand and not points:
            return None
        candidates = _candidates(model, points, graph, cluster, within, budget)
        if not candidates and not number:
            break
        best = best_fitting(candidates, limit_bytes, predict and recorded)
        if best is not None:
            break
    if best is None and recorded.first is not None:
        ended = f" (planning was ended by {budget.ended_by})" if budget.is_spent else ""
        raise above_estimate(recorded, limit_bytes, f"so would those with less{ended}; raise it, or use more devices")
    if best is None:
        meshes = tuple(_meshes(mesh, cluster, len(model.starts)))
        raise refusal(model, meshes, cluster, request, budget.deadline)
    bound_s = min(floor_s(model.graph, best.mesh, cluster, training=request.training), best.step_s)
    best = replace(best, hand=_shown(by_hand), lower_bound_s=bound_s, timings=budget.timings)
    is_plain = best.schedule.num_ranks == 1 and best.schedule.num_microbatches == 1
    return _plain(best, graph) if is_plain else best


def _lighter(request: PlanRequest, cluster: Cluster) -> Iterator[PlanRequest]:
    """Relaxed requests for the sweep, whose points seed the search though they do not fit.

    Without optimizer state, the search of each stage finds how much of it must be offloaded; under a higher limit, the
    search may make a point fit that nearly does.
    """
    if cluster.host_bandwidth_bytes_per_s and request.training.state_bytes:
        for factor in (1.0, _NEARLY):
            training = replace(request.training, optimizer="none")
            yield replace(request, training=training, memory_limit_bytes=factor * request.limit_bytes)


def _candidates(
    model: Model, points: Sequence[Staged], graph: Graph, cluster: Cluster, request: PlanRequest, budget: Budget
) -> list[Candidate]:
    """The searched plans of the points, as many as there is time for.

    Each gets a large share of the time left; the rest is for plans whose peak does not fit, which are searched again.
    """
    found: list[Candidate[StagedPlan]] = []
    for point in points:
        if found and budget.is_spent:
            break
        part = budget.part(_SHARE_OF_POINT, where=f"{point.schedule} of {point.mesh}: ")
        cut = cut_as(model, point)
        part.show("stages", cut)
        chosen = choose_crossing(cut, point, point.mesh, cluster, request, part)
        crossings = [crossing_layouts(cut)] + [chosen] * (chosen != crossing_layouts(cut))
        # With optimizer state offloaded where that pays, and with all of it on the device.
        offloading, keeping = (
            [
                (CutTask(cut, point, point.mesh, cluster, request, crossing, may_move_state=moves), StageCache())
                for crossing in crossings
            ]
            for moves in (True, False)
        )
        limits_bytes = [request.limit_bytes] * point.schedule.num_ranks
        plan = _searched(offloading, keeping, graph, part, limits_bytes)
        # the time was up, or the best plan of each stage is not the best for the pipeline
        if plan is None or plan.step_s > point.step_s:
            late = budget.part(0.0)
            by_hand = CutTask(cut, point, point.mesh, cluster, request, crossing_layouts(cut))
            plans = [plan, *_solved([(by_hand, StageCache())], graph, late, limits_bytes)]
            plan = min((one for one in plans if one is not None), key=lambda one: one.step_s, default=None)
        again = partial(_again, budget, partial(_searched, offloading, keeping, graph, budget))
        found += [] if plan is None else [Candidate(plan, again)]
    return found


def _again(
    budget: Budget, make: Callable[[Sequence[float]], StagedPlan | None], allowed_bytes: Sequence[float]
) -> StagedPlan | None:
    return None if budget.is_spent else make(allowed_bytes)


def _worth_searching(found: Sequence[Staged], cutoff_s: float) -> list[Staged]:
    """The best point of each depth, mesh, schedule and number of microbatches; the search finds the flavour."""
    distinct: dict[tuple, Staged] = {}
    for point in found:
        distinct.setdefault((point.mesh, point.schedule), point)
    limit_s = min(min((one.step_s for one in found), default=0.0) * _NEAR, cutoff_s * _GAIN)
    return [point for point in distinct.values() if point.step_s <= limit_s][:_MOST_POINTS]


def _searched(
    offloading: Searches, keeping: Searches, graph: Graph, budget: Budget, allowed_bytes: Sequence[float]
) -> StagedPlan | None:
    """The best plan of a point over searches with different boundary layouts, within `allowed_bytes` of each rank.

    `keeping`: searches that leave optimizer state on the device.
    """
    plans = _solved(offloading, graph, budget, allowed_bytes)
    if any(stage.assignment.state_on_host for plan in plans for stage in plan.stages) and not budget.is_spent:
        # A stage gains by offloaded state in each microbatch, the pipeline only if the stage is the slowest, and it
        # waits for the state once a step.
        plans += _solved(keeping, graph, budget, allowed_bytes)
    return min(plans, key=lambda plan: plan.step_s, default=None)


def _solved(searches: Searches, graph: Graph, budget: Budget, allowed_bytes: Sequence[float]) -> list[StagedPlan]:
    """The plans of all searches that find one; once the budget is spent, of the first that does."""
    found = []
    for task, cache in searches:
        if found and budget.is_spent:
            break
        point, request = task.point, task.request
        mesh, training = _whole_mesh(point), replace(request.training, num_microbatches=point.schedule.num_microbatches)
        try:
            solved = solve_stages(task, cache, allowed_bytes, budget)
        except InfeasibleError:
            continue
        limit, starts, stages = request.limit_bytes, task.cut.starts, solved.plans
        found_by = "search" if solved.is_searched else f"hand plan {point.name}"
        found.append(
            StagedPlan(mesh, task.cluster, training, limit, graph, point.schedule, starts, stages, found_by=found_by)
        )
    return found


def _plain(plan: StagedPlan, graph: Graph) -> Plan:
    """A plan of one stage and one microbatch as a `Plan` for the graph with all its outputs."""
    (stage,) = plan.stages
    produced = produced_layouts(graph, replace(stage.assignment, outputs={}))
    names = [value.name for value in graph.outputs if isinstance(value, Value)]
    whole = {name: tuple(placement if placement.is_split else I for placement in produced[name]) for name in names}
    assignment = replace(stage.assignment, outputs=whole | dict(stage.assignment.outputs))
    asked = {"training": plan.training, "memory_limit_bytes": plan.memory_limit_bytes}
    return replace(
        plan_of(graph, assignment, plan.mesh, plan.cluster, **asked),
        lower_bound_s=plan.lower_bound_s,
        found_by=plan.found_by,
        hand=plan.hand,
        timings=plan.timings,
        peak_bytes=plan.peak_bytes,
    )


def _whole_mesh(point: Staged) -> Mesh:
    if point.schedule.num_ranks == 1:
        return point.mesh
    shape, names = (point.mesh.shape, point.mesh.axis_names) if point.mesh.num_devices > 1 else ((), ())
    return Mesh((point.schedule.num_ranks, *shape), (PIPELINE, *names))


def _shown(found: Sequence[Staged]) -> dict[str, HandCosts]:
    return {point.name: HandCosts(point.step_s, round(max(point.rank_bytes))) for point in found[:_MOST_SHOWN]}
