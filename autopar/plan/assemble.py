"""From a graph to its plan: every stage of planning, in order; where the mesh is left open, on one mesh after the other."""

from collections.abc import Mapping

from autopar.costmodel.cluster import Cluster
from autopar.costmodel.hardware import check_mesh
from autopar.costmodel.memory import usable_memory_bytes
from autopar.errors import InfeasibleError, PinError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.plan.clock import Clock, Progress
from autopar.plan.factorise import as_used, factorise
from autopar.plan.fine_mesh import solve_any_mesh
from autopar.plan.lift import lift, refines
from autopar.plan.plan import Plan, plan_of
from autopar.plan.setting import Wishes
from autopar.plan.solve_mesh import Solved, solve_mesh


def make_plan(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    *,
    pins: Mapping[str, str] | None = None,
    stored: Mapping[str, str] | None = None,
    memory_limit_bytes: float | None = None,
    optimizer: str = "adamw",
    time_limit_s: float = 30.0,
    progress: Progress | None = None,
) -> Plan:
    """The best plan found in the time, never worse than a hand plan that meets the pins and the memory limit.

    `mesh`: if it is `Devices`, the meshes of `factorise` are searched from the coarsest to the finest, and the plan has the best of them.
    `memory_limit_bytes`: per device, `usable_memory_bytes` of the cluster if it is None. `pins`: FQN -> layout; one holds for all repeats.
    `stored`: the same for what has its layout already, each for itself. `time_limit_s`: of searching.
    PinError, InfeasibleError or MeshError if what is asked cannot be.
    """
    limit = usable_memory_bytes(cluster) if memory_limit_bytes is None else memory_limit_bytes
    wishes = Wishes(pins or {}, stored or {}, limit, optimizer)
    clock = Clock(progress or (lambda _: None))
    check_mesh(cluster, mesh.num_devices)
    if isinstance(mesh, Mesh):
        found = {mesh: solve_any_mesh(graph, mesh, cluster, wishes, time_limit_s=time_limit_s, clock=clock)}
    else:
        cluster = as_used(mesh, cluster)
        found = _solve_all(graph, mesh, cluster, wishes, time_limit_s, clock)
    best = min(found.values(), key=lambda solved: solved.cost_s)
    return plan_of(
        graph, best.assignment, best.mesh, cluster,
        optimizer=optimizer, memory_limit_bytes=limit, lower_bound_s=best.lower_bound_s, found_by=best.found_by, hand=best.hand,
        meshes={str(mesh): solved.cost_s for mesh, solved in found.items()}, timings=clock.timings,
    )  # fmt: skip


def _solve_all(
    graph: Graph, devices: Devices, cluster: Cluster, wishes: Wishes, time_limit_s: float, clock: Clock
) -> dict[Mesh, Solved]:
    """The best plan found on each mesh in an equal share of the time; a finer mesh starts from the plans of those it refines.

    InfeasibleError of the finest mesh if no mesh has a plan.
    """
    if wishes.pins:
        raise PinError(f"pins place tensors on mesh axes, but the mesh of {devices} is left open; write a mesh, e.g. '8x8' or 'dp=8,tp=8'")
    found: dict[Mesh, Solved] = {}
    failure: InfeasibleError | None = None
    meshes = factorise(devices.num_devices, cluster)
    for num_left, mesh in zip(range(len(meshes), 0, -1), meshes):
        used_s = clock.timings["search"]
        starts = [lift(solved.assignment, coarse, mesh) for coarse, solved in found.items() if refines(coarse, mesh)]
        limit_s = used_s + (time_limit_s - used_s) / num_left
        clock.where = f"mesh {mesh}: "
        try:
            found[mesh] = solve_mesh(graph, mesh, cluster, wishes, starts=starts, time_limit_s=limit_s, clock=clock)
        except InfeasibleError as error:
            failure = error
    if not found:
        raise failure
    return found
