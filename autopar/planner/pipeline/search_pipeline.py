"""The best plan in stages and microbatches: a sweep as people tune, then each stage of its best points searched."""

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
from autopar.planner.pipeline.infeasible import refusal
from autopar.planner.pipeline.search_stages import Solver, solve_stages
from autopar.planner.pipeline.sweep import SCHEDULES, Model, Staged, grids, model_of, sweep
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import PIPELINE, StagedPlan, sub_mesh
from autopar.sbp.assignment import produced_layouts
from autopar.sbp.microbatch.microbatch_graph import microbatched
from autopar.sbp.placement import I

# So many points of the sweep are searched at most, if they are nearly as good as the best: the search gains about as
# much on each.
_MOST_POINTS, _NEAR = 3, 1.05
# The search makes a point by hand faster by this factor at most, as a rule.
_GAIN = 1.5
# What takes so much of the memory limit by hand without its optimizer's state, the search may make fit.
_NEARLY = 1.25
# Points by hand that a plan shows.
_MOST_SHOWN = 8
# Of the time that is left: for the sweep, and for the search of a point.
_SHARE_OF_SWEEP, _SHARE_OF_POINT = 0.4, 0.9
# Tensor-parallel degrees beyond this many nodes are not tried.
_MOST_NODES = 2
# Where none of the searched points fits, as it is predicted, the sweep is done again under a limit lowered by this
# factor; after the deadline by what the first of them takes more than its estimate, which is surely enough.
_MOST_SWEEPS, _LOWERED = 3, 0.85


def model_in_stages(graph: Graph, request: PlanRequest) -> Model:
    """What is swept. MicrobatchError if the batch cannot be cut as asked."""
    training_graph = loss_only(graph)
    if request.num_microbatches is not None:
        microbatched(training_graph, request.num_microbatches)  # says what is wrong with it
    return model_of(training_graph, fold(training_graph))


def sweep_stages(
    model: Model, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest, budget: Budget
) -> list[Staged]:
    """The points by hand that fit, fastest first. MeshError for a pipeline axis that is not the first."""
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
            limit_bytes=request.memory_limit_bytes,
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
    """The best plan that has stages, microbatches or recomputed blocks; None if no point of the sweep comes near
    `cutoff_s` seconds.

    Where no plan fits by the deadline, and none need only beat another, a few points by hand are tried after it: late
    is better than none. Never slower than the best point of the sweep that fits, as it is estimated. InfeasibleError,
    with the least memory that would do, if none fits. predict: as in `choose_plan`.
    """
    best, recorded, limit_bytes = None, Recorded(predict), request.memory_limit_bytes
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
    """For points by hand from which the search may come to plans that fit: with optimizer state left out, the search of
    each stage finds how much of it has to go to the host; and what nearly fits it may make fit.
    """
    if cluster.host_bandwidth_bytes_per_s and request.training.state_bytes:
        for factor in (1.0, _NEARLY):
            training = replace(request.training, optimizer="none")
            yield replace(request, training=training, memory_limit_bytes=factor * request.memory_limit_bytes)


def _candidates(
    model: Model, points: Sequence[Staged], graph: Graph, cluster: Cluster, request: PlanRequest, budget: Budget
) -> list[Candidate]:
    """The plans of the points, as many as there is time for. Each gets most of the time that is left: some is kept for
    plans that turn out not to fit. Those are made anew as long as there is time.
    """
    found: list[Candidate] = []
    for point in points:
        if found and budget.is_spent:
            break
        part = budget.part(_SHARE_OF_POINT, where=f"{point.schedule} of {point.mesh}: ")
        cut = cut_as(model, point)
        part.show("stages", cut)
        chosen = choose_crossing(cut, point, point.mesh, cluster, request, part)
        crossings = [crossing_layouts(cut)] + [chosen] * (chosen != crossing_layouts(cut))
        solvers, keeping = (
            [
                Solver(cut, point, point.mesh, cluster, request, crossing, part, may_move_state=moves)
                for crossing in crossings
            ]
            for moves in (True, False)
        )
        plan = _searched(solvers, keeping, graph, part, [request.memory_limit_bytes] * point.schedule.num_ranks)
        # time was up, or what is best for each stage is not for the pipeline
        if plan is None or plan.step_s > point.step_s:
            late = budget.part(0.0)
            written = Solver(cut, point, point.mesh, cluster, request, crossing_layouts(cut), late)
            plans = [
                plan,
                _searched([written], (), graph, late, [request.memory_limit_bytes] * point.schedule.num_ranks),
            ]
            plan = min((one for one in plans if one is not None), key=lambda one: one.step_s, default=None)
        again = partial(_again, budget, partial(_searched, solvers, keeping, graph, budget))
        found += [] if plan is None else [Candidate(plan, again)]
    return found


def _again(
    budget: Budget, make: Callable[[Sequence[float]], StagedPlan | None], allowed_bytes: Sequence[float]
) -> StagedPlan | None:
    return None if budget.is_spent else make(allowed_bytes)


def _worth_searching(found: Sequence[Staged], cutoff_s: float) -> list[Staged]:
    """The best points, one of each depth, mesh, schedule and number of microbatches: the flavour is for the search to
    find.
    """
    distinct: dict[tuple, Staged] = {}
    for point in found:
        distinct.setdefault((point.mesh, point.schedule), point)
    limit_s = min(min((one.step_s for one in found), default=0.0) * _NEAR, cutoff_s * _GAIN)
    return [point for point in distinct.values() if point.step_s <= limit_s][:_MOST_POINTS]


def _searched(
    solvers: Sequence[Solver], keeping: Sequence[Solver], graph: Graph, budget: Budget, allowed_bytes: Sequence[float]
) -> StagedPlan | None:
    """The plan of a point, with the best of some layouts of what crosses its cuts, whose estimate is at most
    `allowed_bytes` of each rank. keeping: solvers that leave optimizer state on the device.
    """
    plans = _solved(solvers, graph, budget, allowed_bytes)
    if any(stage.assignment.state_on_host for plan in plans for stage in plan.stages) and not budget.is_spent:
        # A stage gains by it in each microbatch, the pipeline only where the stage is the slowest, and it waits for it
        # once a step.
        plans += _solved(keeping, graph, budget, allowed_bytes)
    return min(plans, key=lambda plan: plan.step_s, default=None)


def _solved(
    solvers: Sequence[Solver], graph: Graph, budget: Budget, allowed_bytes: Sequence[float]
) -> list[StagedPlan]:
    """The plans of those that find one; of the first that does, once the budget is spent."""
    found = []
    for solver in solvers:
        if found and budget.is_spent:
            break
        point, request = solver.found, solver.request
        mesh, training = _whole_mesh(point), replace(request.training, num_microbatches=point.schedule.num_microbatches)
        try:
            stages = _stages(solver, allowed_bytes, budget)
        except InfeasibleError:
            continue
        limit, starts = request.memory_limit_bytes, solver.cut.starts
        found_by = "search" if solver.is_searched else f"hand plan {point.name}"
        found.append(
            StagedPlan(mesh, solver.cluster, training, limit, graph, point.schedule, starts, stages, found_by=found_by)
        )
    return found


def _stages(solver: Solver, allowed_bytes: Sequence[float], budget: Budget) -> tuple[Plan, ...]:
    """The plans of the stages. Where the budget ends between ranks, what they share may be stored otherwise than by
    hand on those that were searched, and then the others cannot be as by hand: all are.
    """
    try:
        return solve_stages(solver, allowed_bytes, budget)
    except InfeasibleError:
        if not (budget.is_spent and solver.is_searched):
            raise
        solver.forget()
        return solve_stages(solver, allowed_bytes, budget)


def _plain(plan: StagedPlan, graph: Graph) -> Plan:
    """The plan of one stage and one microbatch for the graph with all its outputs."""
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
