"""Search on meshes of too many axes to list all strategies: around the plan of a coarser mesh."""

import math
from dataclasses import dataclass, replace

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.work_bound import floor_s
from autopar.errors import InfeasibleError
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.layouts.optimizer_offload import host_search
from autopar.planner.layouts.refine_mesh import lift
from autopar.planner.layouts.search_mesh import ANY, Solved, fold_stored
from autopar.planner.layouts.search_overlap import MeshRounds, timed
from autopar.planner.problem import Setting
from autopar.planner.request import PlanRequest

# On four axes an op may have 2,000 strategies and a pair of ops 4 million; on three, 343 and 0.1 million.
MOST_AXES = 3
_MOST_ROUNDS = 6


@dataclass(frozen=True)
class MeshSearch:
    """One of the meshes from coarse to fine, with the request and the budget of its search."""

    mesh: Mesh
    request: PlanRequest
    budget: Budget


def coarse_to_fine(mesh: Mesh, request: PlanRequest, budget: Budget) -> tuple[MeshSearch, ...]:
    """The searches of a mesh: of coarser meshes of at most `MOST_AXES` axes and more, then of the mesh itself.

    The plan of each is improved on the next (`refined`). A mesh of few axes is searched alone.
    """
    steps = [MeshSearch(mesh, request, budget)]
    while not mesh.shares and sum(size > 1 for size in steps[0].mesh.shape) > MOST_AXES:
        unpinned = replace(request, pins={}, stored={}, excluded={}, outputs={})  # layouts are for this mesh
        steps.insert(0, MeshSearch(_merged(steps[0].mesh), unpinned, steps[0].budget.part(0.5)))
    return tuple(steps)


def refined(coarse: Solved, graph: Graph, cluster: Cluster, step: MeshSearch) -> Solved:
    """The best plan found around that of a coarser mesh, improved as long as changes on few axes help.

    Its lower bound is that of the work alone (`floor_s`).
    """
    mesh, request, budget = step.mesh, step.request, step.budget
    folded = fold_stored(graph, request)
    classes = segmented(folded, graph, ends_apart(folded))
    best, cost_s = lift(coarse.assignment, coarse.mesh, mesh), math.inf
    best = replace(best, outputs={**best.outputs, **request.outputs})
    for _ in range(_MOST_ROUNDS):
        setting = Setting(graph, mesh, cluster, request, budget, near=best)
        problem = setting.problem(classes)
        start = problem.encode(best)
        starts = [] if start is None else [start]
        try:
            search = MeshRounds(setting, problem, starts, [timed(setting, problem, start) for start in starts])
            for at in search.rounds():
                search.take(at.setting.search(at.problem, at.starts))
            assignment, assignment_s = search.solution.assignment, search.solution.step_s
        except InfeasibleError:
            on_host = host_search(setting, problem)
            if on_host is None:
                raise
            moved = on_host.solved(on_host.setting.search(on_host.problem, starts))
            assignment, assignment_s = moved.assignment, moved.step_s
        is_done = assignment_s >= cost_s * (1 - 1e-6) or budget.is_spent
        if assignment_s < cost_s:
            best, cost_s = assignment, assignment_s
        if is_done:
            break
    bound_s = min(cost_s, floor_s(graph, mesh, cluster, training=request.training))
    return Solved(mesh, best, cost_s, bound_s, ANY, coarse.hand, "search")


def _merged(mesh: Mesh) -> Mesh:
    """`mesh` with the two neighbouring axes of the smallest product merged into one.

    >>> str(_merged(Mesh((4, 2, 2, 8), ("a", "b", "c", "d"))))
    'a=4,b_c=4,d=8'
    """
    i = min(range(mesh.ndim - 1), key=lambda i: mesh.shape[i] * mesh.shape[i + 1])
    shape = (*mesh.shape[:i], mesh.shape[i] * mesh.shape[i + 1], *mesh.shape[i + 2 :])
    return Mesh(shape, (*mesh.axis_names[:i], "_".join(mesh.axis_names[i : i + 2]), *mesh.axis_names[i + 2 :]))
