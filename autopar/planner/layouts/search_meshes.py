"""`make_plan`: the plan of a graph without stages, on a given mesh or on the best of several."""

import math
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from autopar.costmodel.cluster.hardware import check_mesh
from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.costmodel.training import Training
from autopar.costmodel.work_bound import floor_bytes, floor_s
from autopar.errors import InfeasibleError, PinError
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.rarely_collected import rarely_collected
from autopar.mesh import Devices, Mesh
from autopar.planner.budget import Budget, Interrupted
from autopar.planner.fit_memory import MOST_TRIES, Fit, LimitedSearch, Predict
from autopar.planner.handwritten.tune import Tried, Tuned, tuned
from autopar.planner.layouts.many_axes import coarse_to_fine, refined
from autopar.planner.layouts.mesh_shapes import as_used, factorise, most_tensor
from autopar.planner.layouts.refine_mesh import lift, refines
from autopar.planner.layouts.search_mesh import ANY, Solved, fold_stored, solve_mesh
from autopar.planner.layouts.tie import least_communication, least_gain
from autopar.planner.problem import Setting
from autopar.planner.request import ANYTHING, PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.search.deadline import NEVER
from autopar.units import format_bytes

# The share of a plan's time for its first search; the rest is for further ones, if its plan does not fit.
_SHARE_OF_FIRST = 0.5
# The most meshes that are searched for an open mesh.
_MOST_MESHES = 4
# A mesh is not searched if its best hand plan takes this many times as long as the best of all (or this many times its
# memory if none fits).
_PROMISING = 1.5
# A hand plan up to this multiple of the memory limit counts as nearly fitting: the search may make it fit.
_NEARLY = 1.25
# So many hand plans above the memory limit by the estimate, the fastest, may show by their peaks that they fit.
_MOST_NEARLY = 2
# The factors by which a plan on a finer mesh, and a plan of the search, is faster at most than one on the coarsest and
# one by hand, as a rule.
_FINER, _GAIN = 1.1, 1.5
# The share of the time left for the next mesh.
_SHARE = 0.6


def make_plan(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest = ANYTHING,
    *,
    to_beat_s: float = math.inf,
    budget: Budget | None = None,
    predict: Predict | None = None,
) -> Plan:
    """The best plan within the budget, never worse than a hand plan that satisfies the pins and the memory limit.

    `mesh`: for `Devices`, the promising meshes of `factorise` are searched, most promising first, and the plan has the
    best of them. `to_beat_s`: an open mesh is not searched if no hand plan, without regard to memory, takes less, the
    search on another one ends once no plan can, and a plan that takes longer, on an open mesh by more than what
    stages have to gain, is returned without a prediction.
    `budget`: by default the time limit of the request. `predict`: as in `choose_plan`. PinError, InfeasibleError or
    MeshError if no plan satisfies the request.
    """
    request, budget = request.on(cluster), budget or Budget.of(request.time_limit_s)
    _check(graph, mesh, cluster, request, budget)
    cluster = as_used(mesh, cluster) if isinstance(mesh, Devices) else cluster
    fit = Fit[Plan](request.limit_bytes, predict, budget, waiting=[LimitedSearch((request.limit_bytes,))])
    bound_s, most_s = math.inf, to_beat_s / (1 - least_gain(cluster)) if isinstance(mesh, Devices) else to_beat_s
    with rarely_collected():
        for search in fit.searches():
            is_first, allowed_bytes = not search.number, min(search.allowed_bytes)
            if not is_first and budget.is_spent and allowed_bytes < request.limit_bytes:
                fit.reasons.append(f"another plan was not looked for, since planning was ended by {budget.ended_by}")
                continue
            within = replace(request, memory_limit_bytes=allowed_bytes)
            # the first search leaves time for others in case its plan does not fit
            part = budget.part(_SHARE_OF_FIRST) if is_first and predict else budget
            try:
                if isinstance(mesh, Devices):
                    by_mesh = _on_open_mesh(graph, mesh, cluster, within, to_beat_s, part)
                else:
                    coarse, *finer = coarse_to_fine(mesh, within, part)
                    least: dict[str, Any] = {"to_beat_s": to_beat_s, "budget": coarse.budget}
                    solved = solve_mesh(graph, coarse.mesh, cluster, coarse.request, **least)
                    for step in finer:
                        solved = refined(solved, graph, cluster, step)
                    by_mesh = {mesh: solved}
            except InfeasibleError as error:
                if is_first:
                    raise
                fit.reasons.append(str(error))
                continue
            plan = _plan_of_best(graph, by_mesh.values(), cluster, within, budget)
            if is_first and plan.step_s > most_s:
                return plan
            fit.waiting.append(replace(search, plan=plan))
            if is_first:
                bound_s = plan.lower_bound_s
                plans = _nearly_fitting(graph, by_mesh.values(), cluster, request, budget) if predict else ()
                fit.waiting += [replace(search, plan=one, number=MOST_TRIES) for one in plans]
    if fit.best is None:
        raise fit.refusal("so would others; raise it, or use more devices")
    return replace(fit.best, lower_bound_s=min(bound_s, fit.best.lower_bound_s))


def _check(graph: Graph, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest, budget: Budget) -> None:
    """MeshError if the mesh does not fit the cluster; InfeasibleError if another way to plan follows, and a device
    saves more than the memory limit in any plan. One with fewer rows than others may save less than its share.
    """
    check_mesh(cluster, mesh.num_devices)
    if not budget.has_other or (isinstance(mesh, Mesh) and mesh.shares):
        return
    least_bytes, limit_bytes = floor_bytes(graph, mesh.num_devices), request.limit_bytes
    if least_bytes > limit_bytes:
        raise InfeasibleError(
            f"without microbatches and checkpointing a device saves {format_bytes(least_bytes)} of activations at"
            f" least, more than the limit of {format_bytes(limit_bytes)}"
        )


def _nearly_fitting(
    graph: Graph, solved: Collection[Solved], cluster: Cluster, request: PlanRequest, budget: Budget
) -> list[Plan]:
    """The plans by hand above the memory limit by the estimate whose peaks may show that they fit."""
    nearly = sorted((one for each in solved for one in each.nearly), key=lambda one: one.cost_s)
    return [_plan_of_best(graph, [one], cluster, request, budget) for one in nearly[:_MOST_NEARLY]]


def _plan_of_best(
    graph: Graph, solved: Collection[Solved], cluster: Cluster, request: PlanRequest, budget: Budget
) -> Plan:
    best = least_communication(solved, graph, cluster, request.training)
    training, limit_bytes = request.training, request.limit_bytes
    return replace(
        plan_of(graph, best.assignment, best.mesh, cluster, training=training, memory_limit_bytes=limit_bytes),
        lower_bound_s=best.lower_bound_s,
        bound_of=best.bound_of,
        found_by=best.found_by,
        hand=best.hand,
        timings=budget.timings,
        meshes={str(one.mesh): one.cost_s for one in solved},
    )


def _on_open_mesh(
    graph: Graph, devices: Devices, cluster: Cluster, request: PlanRequest, to_beat_s: float, budget: Budget
) -> dict[Mesh, Solved]:
    """Mesh -> its best plan, for the promising meshes, most promising first, and that of the best hand plan if better.

    A mesh gets a large share of the time left, and is dropped when its lower bound exceeds the incumbent. Its search
    starts from the plans of the meshes that it refines. Without time the best hand plan is returned. InfeasibleError of
    the last mesh if there is no plan.
    """
    by_hand = _by_hand(graph, devices, cluster, request, to_beat_s, budget)
    if budget.is_spent and by_hand.best is not None:
        return {by_hand.best.mesh: _as_written(by_hand, graph, cluster, request.training)}
    by_mesh: dict[Mesh, Solved] = {}
    failure: InfeasibleError | None = None
    meshes = _promising(factorise(devices.num_devices, cluster), by_hand.tried, request.limit_bytes)
    for mesh in meshes:
        if budget.is_spent and (by_mesh or failure):
            break
        starts = [lift(solved.assignment, coarse, mesh) for coarse, solved in by_mesh.items() if refines(coarse, mesh)]
        to_beat_s = min((solved.cost_s for solved in by_mesh.values()), default=to_beat_s)
        part = budget.part(1.0 if mesh == meshes[-1] else _SHARE, where=f"mesh {mesh}: ")
        part = replace(part, has_other=budget.has_other or bool(by_mesh))
        try:
            by_mesh[mesh] = solve_mesh(graph, mesh, cluster, request, starts=starts, to_beat_s=to_beat_s, budget=part)
        except InfeasibleError as error:
            failure = error
        except Interrupted:
            if not by_mesh:
                raise
    best, best_s = by_hand.best, min((solved.cost_s for solved in by_mesh.values()), default=math.inf)
    if best is not None and best.costs.step_s < best_s and budget.is_spent:
        by_mesh[best.mesh] = _as_written(by_hand, graph, cluster, request.training)
    elif best is not None and best.costs.step_s < best_s:
        # Its mesh has few axes, mostly one or two: the search takes little, ends with this plan or a better one, and
        # gives a lower bound.
        part = replace(budget.part(1.0, where=f"mesh {best.mesh}: "), has_other=True)
        try:
            by_mesh[best.mesh] = solve_mesh(graph, best.mesh, cluster, request, starts=by_hand.starts, budget=part)
        except Interrupted:
            by_mesh[best.mesh] = _as_written(by_hand, graph, cluster, request.training)
    if not by_mesh:
        raise failure or InfeasibleError(
            f"no mesh of {devices.num_devices} devices lies within the cluster's link levels"
        )
    return by_mesh


def _by_hand(
    graph: Graph, devices: Devices, cluster: Cluster, request: PlanRequest, to_beat_s: float, budget: Budget
) -> Tuned:
    """The hand plans of an open mesh; InfeasibleError if none can beat `to_beat_s`, or for lack of time."""
    if request.pins:
        raise PinError(
            f"pins place tensors on mesh axes, but the mesh of {devices} is left open; write a mesh, e.g. '8x8' or"
            " 'dp=8,tp=8'"
        )
    limit, training = request.limit_bytes, request.training
    has_other = to_beat_s < math.inf  # the caller has another plan, so that none need be found here
    deadline = budget.deadline if has_other else NEVER
    most = most_tensor(devices.num_devices, cluster) if has_other else math.inf
    asked: dict[str, Any] = {"memory_limit_bytes": limit, "training": training}
    with budget.left_at_interrupt() if budget.has_other else nullcontext(), budget.timed("hand plans"):
        by_hand = tuned(graph, fold(graph), devices, cluster, **asked, most_tensor=most, deadline=deadline)
    by_hand_s = min(one.costs.step_s for one in by_hand.tried)
    coarsest, *_ = factorise(devices.num_devices, cluster)
    if by_hand_s > to_beat_s and not _are_no_guide(graph, coarsest, cluster, request, (to_beat_s, by_hand_s), budget):
        raise InfeasibleError(
            f"no plan without stages and microbatches takes less than {to_beat_s} s; a plan with them is better"
        )
    if budget.is_spent and by_hand.best is None and has_other:
        raise InfeasibleError(
            f"planning was ended by {budget.ended_by} before a plan without stages and microbatches was searched"
        )
    return by_hand


def _are_no_guide(
    graph: Graph, mesh: Mesh, cluster: Cluster, request: PlanRequest, costs_s: tuple[float, float], budget: Budget
) -> bool:
    """Whether hand plans say nothing of the best plan: without a memory limit, one on `mesh`, the coarsest, comes near
    the first of `costs_s` and is far from the second, that of the best plan by hand.

    So it is for models that nobody splits by hand: with lookups in large tables, graphs or recurrent layers the best
    plan by hand takes five to forty times as long as the best of all.
    """
    to_beat_s, by_hand_s = costs_s
    most_s = min(_FINER * to_beat_s, by_hand_s / _GAIN)
    if budget.is_spent or floor_s(graph, mesh, cluster, training=request.training) > most_s:
        return False
    setting = Setting(graph, mesh, cluster, replace(request, memory_limit_bytes=math.inf), budget)
    problem = setting.problem(fold_stored(graph, request))
    choice = replace(setting, to_beat_s=most_s).search(problem, [])
    step_s = setting.costs(problem.decode(choice.strategies)).step_s if setting.has_overlap else choice.cost_s
    return step_s <= most_s


def _as_written(by_hand: Tuned, graph: Graph, cluster: Cluster, training: Training) -> Solved:
    """The best hand plan without a search; its lower bound is that of the work alone."""
    best, assignment = by_hand.best, by_hand.assignment
    assert best is not None and assignment is not None, "a hand plan fits"
    costs = {one.name: one.costs for one in by_hand.tried if one.mesh == best.mesh}
    bound_s = min(best.costs.step_s, floor_s(graph, best.mesh, cluster, training=training))
    return Solved(best.mesh, assignment, best.costs.step_s, bound_s, ANY, costs, f"hand plan {best.name}")


def _promising(meshes: tuple[Mesh, ...], tried: tuple[Tried, ...], limit_bytes: float) -> list[Mesh]:
    """The meshes of the best hand plans, best first: the fastest that nearly fits, else the lightest.

    Ties: the coarsest first.
    """
    most_bytes = _NEARLY * limit_bytes
    fits = any(one.costs.memory_bytes <= most_bytes for one in tried)

    def rank(mesh: Mesh) -> float:
        degrees = {math.prod(mesh.shape[:count]) for count in range(mesh.ndim + 1)}
        here = [one.costs for one in tried if _data_degree(one) in degrees]
        if not fits:
            return min(costs.memory_bytes for costs in here)
        return min((costs.step_s for costs in here if costs.memory_bytes <= most_bytes), default=math.inf)

    ranks = {mesh: rank(mesh) for mesh in meshes}
    least = min(ranks.values())
    return [mesh for mesh in sorted(meshes, key=ranks.__getitem__) if ranks[mesh] <= _PROMISING * least][:_MOST_MESHES]


def _data_degree(one: Tried) -> int:
    return math.prod(size for axis, size in enumerate(one.mesh.shape) if axis not in one.plan.tensor_axes)
