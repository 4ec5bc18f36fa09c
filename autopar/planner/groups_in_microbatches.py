"""`plan_on_groups`: the plan for groups of devices that differ, in as many microbatches as their memory asks for."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.costmodel.cluster.device_groups import ranks_of
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.work_bound import speeds_floor_s
from autopar.errors import InfeasibleError, MeshError
from autopar.ir.graph import Graph, Value
from autopar.ir.passes.keep_loss import loss_only
from autopar.mesh import Devices, Mesh
from autopar.planner.budget import Budget
from autopar.planner.fit_memory import AfterOthers, Predict
from autopar.planner.request import PlanRequest
from autopar.planner.seen_by_groups import InMore, KnownChoices, MadeInMore
from autopar.planner.unequal_devices import OnMesh, plain
from autopar.plans.plan import Plan
from autopar.plans.resplit import resplit
from autopar.plans.seen_rank import view_of
from autopar.plans.staged_plan import StagedPlan, stage_graphs
from autopar.sbp.microbatch.microbatch_graph import microbatch_counts
from autopar.schedule.orders import Schedule
from autopar.units import format_seconds

# What a bound of the sum of speeds is of.
ANY_SHARES = "plan on these devices or some of them"
# The share of the time left for each number of microbatches but the last.
_SHARE_OF_COUNT = 0.5
# A step that is longer by a smaller share than this is hardly longer.
_HARDLY = 1e-3


def plan_on_groups(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest,
    *,
    to_beat_s: float = math.inf,
    budget: Budget,
    predict: Predict | None = None,
) -> Plan | StagedPlan:
    """The best plan found on all devices of a cluster of groups, without stages.

    More microbatches are tried as long as memory keeps a group from having the rows that its speed asks for, and they
    gain. `mesh`: the groups lie along its first axis; an open one is tried as one axis, and with a second one within
    the nodes of all groups. Its lower bound holds for all plans on these devices. InfeasibleError if no shares fit in
    every group's memory; MeshError for a mesh that the groups do not lie on. `to_beat_s`: as of `_How`.
    """
    assert cluster.groups is not None, "a cluster of groups"
    check_groups(mesh, cluster)
    if isinstance(mesh, Mesh):
        view_of(mesh, cluster, 0)  # checks that shares which are asked for lie along the groups
    asked = [size for _, rows in request.shares for size in rows]  # each is cut in as many equal parts
    counts = [count for count in _counts(graph, request) if all(size % count == 0 for size in asked)]
    best, refused = None, None
    floor_s = speeds_floor_s(graph, cluster.groups, request.training)
    for number, count in enumerate(counts):
        if number and budget.is_spent:
            break
        part = budget.part(_SHARE_OF_COUNT if number + 1 < len(counts) else 1.0)
        least_s = to_beat_s if best is None else min(to_beat_s, best.step_s)
        how = _How(part, predict, least_s, later=tuple(counts[number + 1 :]))
        try:
            found, is_capped = _in_microbatches(graph, mesh, cluster, request, count, how)
        except InfeasibleError as error:
            refused = error
            continue
        except MadeInMore as made:
            best = made.plan
            break
        if found is None:
            refused = refused or InfeasibleError(
                f"no plan in {count} microbatches takes less than {format_seconds(least_s)}"
            )
            break
        if best is not None and found.step_s >= best.step_s:
            break
        best = found
        if not is_capped or found.step_s >= to_beat_s:
            break
        if isinstance(predict, AfterOthers):
            to_beat_s = min(to_beat_s, predict.least_s(best.step_s))
    if best is None:
        assert refused is not None, "there is a number of microbatches"
        raise refused
    return replace(best, lower_bound_s=min(floor_s, best.step_s), bound_of=ANY_SHARES, timings=budget.timings)


def _counts(graph: Graph, request: PlanRequest) -> tuple[int, ...]:
    """The numbers of microbatches to try."""
    if request.num_microbatches is not None or not request.trains:
        return (request.num_microbatches or 1,)
    counts = microbatch_counts(graph.once(loss_only)) if any(map(_is_loss, graph.outputs)) else (1,)
    return tuple(count for count in counts if count & (count - 1) == 0)


def _is_loss(value: object) -> bool:
    return isinstance(value, Value) and value.needs_grad and not value.shape


@dataclass(frozen=True)
class _How:
    """How a number of microbatches is planned: `later` are those that may be tried after it, `to_beat_s` the step that
    others take, with which no peak is predicted where no plan in the first shares takes less; the rest as in `OnMesh`.
    """

    budget: Budget
    predict: Predict | None
    to_beat_s: float
    later: tuple[int, ...] = ()
    in_more: InMore | None = None
    start: KnownChoices | None = None


def _in_microbatches(
    graph: Graph, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest, count: int, how: _How
) -> tuple[Plan | StagedPlan | None, bool]:
    """The best plan in so many microbatches, None if it is found to be too slow, and whether memory holds it back: each
    is planned as a batch, and the shares are those of all. MadeInMore if a plan in `later` ones is as good.
    """

    def in_more(start: KnownChoices, least_s: float) -> None:
        told = f"{start.found_by}, and no plan in these shares in less than {format_seconds(least_s)}"
        to_beat_s, sizes = min(how.to_beat_s, (1 + _HARDLY) * least_s), tuple(count * size for size in start.sizes)
        for more in how.later:
            if any(size % more for size in sizes):
                return
            again = KnownChoices(start.choices, tuple(size // more for size in sizes), told)
            with suppress(InfeasibleError):
                asked = _How(how.budget, how.predict, to_beat_s, start=again)
                found, _ = _in_microbatches(graph, mesh, cluster, request, more, asked)
                if isinstance(found, StagedPlan):
                    raise MadeInMore(found)
                return

    # What is known of one pass is so of more (`ScheduleBounds.one_pass_s`). Of an open mesh another may be better.
    members = [one for _, one in cluster.groups.members] if cluster.groups is not None else []
    is_by_data_sheet = all(one.calibration is None and not one.overlap for one in members)
    if how.later and isinstance(mesh, Mesh) and is_by_data_sheet:
        how = replace(how, in_more=in_more)
    if count == 1:
        return _best_on_groups(graph, mesh, cluster, request, how)
    _, (stage,) = stage_graphs(graph, (), count)
    training, schedule = request.training.staged(count, 1), Schedule("accumulate", 1, 1, count)

    def whole(plan: Plan) -> StagedPlan:
        place = plain(plan.mesh), plan.cluster, training, plan.memory_limit_bytes
        told = {"found_by": plan.found_by, "hand": plan.hand, "peak_bytes": plan.peak_bytes}
        return StagedPlan(*place, graph, schedule, (), (plan,), **told)

    predict, one = how.predict, replace(request, training=training)
    if isinstance(mesh, Mesh):
        mesh = replace(mesh, shares=tuple((axis, tuple(size // count for size in rows)) for axis, rows in mesh.shares))
    if isinstance(predict, AfterOthers):
        how = replace(how, predict=replace(predict, predict=lambda plan: predict(whole(plan))))
    elif predict is not None:
        how = replace(how, predict=lambda plan: predict(whole(plan)))
    found, is_capped = _best_on_groups(stage.graph, mesh, cluster, one, how)
    if found.step_s >= how.to_beat_s:
        return None, is_capped
    ((_, rows),) = found.mesh.shares or ((0, ()),)
    of_batch = resplit(found, tuple(count * size for size in rows))
    return whole(replace(of_batch, hand=found.hand, peak_bytes=found.peak_bytes)), is_capped


def _best_on_groups(
    graph: Graph, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest, how: _How
) -> tuple[Plan, bool]:
    """The best plan of `graph` on any of the meshes, and whether memory keeps a group from having more rows."""
    best: Plan | None = None
    is_capped = False
    failure: InfeasibleError | None = None
    meshes = list(_meshes(mesh, cluster))
    for number, one in enumerate(meshes):
        if how.budget.is_spent and best is not None:
            break
        part = how.budget.part(1 / (len(meshes) - number))
        asked = part, how.predict, how.to_beat_s, how.in_more, how.start
        try:
            search = OnMesh(graph, one, cluster, request, *asked)
            plan = search.best()
        except InfeasibleError as error:
            failure = error
            continue
        if best is None or plan.step_s < best.step_s:
            best, is_capped = plan, search.is_capped
    if best is None:
        assert failure is not None, "there is a mesh"
        raise failure
    return best, is_capped


def check_groups(mesh: Mesh | Devices, cluster: Cluster) -> None:
    """MeshError unless the mesh is of all devices of a cluster of groups, with each group's along the first axis."""
    if mesh.num_devices != cluster.num_devices or (isinstance(mesh, Devices) and mesh.per_node):
        raise MeshError(
            f"cluster {cluster.name} has {cluster.num_devices:.0f} devices, the mesh is {mesh}: take a mesh of all of"
            " them, nodes as they are"
        )
    if isinstance(mesh, Mesh):
        try:
            ranks_of(cluster, mesh.shape[0])
        except ValueError as error:
            raise MeshError(f"mesh {mesh}: {error}") from error


def _meshes(mesh: Mesh | Devices, cluster: Cluster) -> Iterator[Mesh]:
    """The meshes to try: one axis, then two, of which the inner one is within a node of every group."""
    assert cluster.groups is not None, "a cluster of groups"
    if isinstance(mesh, Mesh):
        yield mesh
        return
    nodes = (math.gcd(count, _node(one)) for count, one in cluster.groups.members)
    most = math.gcd(*nodes)
    for inner in (size for size in range(1, most + 1) if most % size == 0):
        yield (
            Mesh((mesh.num_devices // inner, inner), ("d0", "d1")) if inner > 1 else Mesh((mesh.num_devices,), ("d0",))
        )


def _node(cluster: Cluster) -> int:
    return cluster.levels[0].size if len(cluster.levels) > 1 else 1
