"""Search on meshes of too many axes to list all strategies: around the plan of a coarser mesh."""

import math
from collections.abc import Iterable
from dataclasses import replace

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.work_bound import floor_s
from autopar.errors import InfeasibleError
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.layouts.optimizer_offload import search_on_host
from autopar.planner.layouts.refine_mesh import lift
from autopar.planner.layouts.search_mesh import ANY, Solved, fold_stored, solve_mesh
from autopar.planner.problem import Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.sbp.assignment import Assignment

# On four axes an op may have 2,000 strategies and a pair of ops 4 million; on three, 343 and 0.1 million.
MOST_AXES = 3
_MOST_ROUNDS = 6


def solve_any_mesh(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    request: PlanRequest,
    *,
    starts: Iterable[Assignment] = (),
    budget: Budget,
) -> Solved:
    """The result of `solve_mesh`; on more than `MOST_AXES` axes the best plan of a coarser mesh, improved.

    It is improved as long as changes on few axes help. Its lower bound is then that of the work alone (`floor_s`).
    """
    if sum(size > 1 for size in mesh.shape) <= MOST_AXES:
        return solve_mesh(graph, mesh, cluster, request, starts=starts, budget=budget)
    coarse = _merged(mesh)
    unpinned = replace(request, pins={}, stored={})  # layouts are for this mesh
    first = solve_any_mesh(graph, coarse, cluster, unpinned, budget=budget.part(0.5))
    folded = fold_stored(graph, request)
    classes = segmented(folded, graph, ends_apart(folded))
    best, cost_s = lift(first.assignment, coarse, mesh), math.inf
    for _ in range(_MOST_ROUNDS):
        setting = Setting(graph, mesh, cluster, request, budget, near=best)
        problem = setting.problem(classes)
        start = problem.encode(best)
        found, found_s = _search(setting, problem, [] if start is None else [start])
        is_done = found_s >= cost_s * (1 - 1e-6) or budget.is_spent
        if found_s < cost_s:
            best, cost_s = found, found_s
        if is_done:
            break
    bound_s = min(cost_s, floor_s(graph, mesh, cluster, training=request.training))
    return Solved(mesh, best, cost_s, bound_s, ANY, first.hand, "search")


def _search(setting: Setting, problem: Problem, starts: list[tuple[int, ...]]) -> tuple[Assignment, float]:
    """(best assignment, seconds of its step), with optimizer state on the host if nothing fits otherwise."""
    try:
        choice = setting.search(problem, starts)
    except InfeasibleError:
        on_host = search_on_host(setting, problem, starts)
        if on_host is None:
            raise
        return on_host.assignment, on_host.step_s
    return problem.decode(choice.strategies), choice.cost_s


def _merged(mesh: Mesh) -> Mesh:
    """`mesh` with the two neighbouring axes of the smallest product merged into one.

    >>> str(_merged(Mesh((4, 2, 2, 8), ("a", "b", "c", "d"))))
    'a=4,b_c=4,d=8'
    """
    i = min(range(mesh.ndim - 1), key=lambda i: mesh.shape[i] * mesh.shape[i + 1])
    shape = (*mesh.shape[:i], mesh.shape[i] * mesh.shape[i + 1], *mesh.shape[i + 2 :])
    return Mesh(shape, (*mesh.axis_names[:i], "_".join(mesh.axis_names[i : i + 2]), *mesh.axis_names[i + 2 :]))
