"""`choose_devices`: the best plan on all groups of a cluster's devices or on some, where the others would slow it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from time import perf_counter
from typing import Any

from autopar.costmodel.cluster.device_groups import joined
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.training import Training
from autopar.costmodel.work_bound import speeds_floor_s
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.planner.budget import Progress, Watch
from autopar.planner.choose import choose_plan
from autopar.planner.fit_memory import Predict
from autopar.planner.request import ANYTHING, PlanRequest
from autopar.planner.unequal_devices import ANY_SHARES
from autopar.plans.plan import Plan
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import StagedPlan
from autopar.units import format_seconds

Member = tuple[int, Cluster]  # as of `DeviceGroups`
# The share of the time for the plan on all devices; the rest is for plans on some of the groups.
_SHARE_OF_ALL = 0.6


def choose_devices(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest = ANYTHING,
    *,
    progress: Progress | None = None,
    predict: Predict | None = None,
    watch: Watch | None = None,
) -> Plan | StagedPlan:
    """`choose_plan`, which of a cluster of groups may leave out groups: the plan's mesh has fewer devices then.

    On an open mesh the groups may lie along the ranks in another order than that of the cluster (`reordered_from`).
    Each set of groups is planned unless the sum of its speeds shows that it takes longer than the best plan so far; a
    single group as any cluster, with stages and microbatches. On a mesh with axes the first is shorter by the ranks
    that are left out. The plan's lower bound is of all these. A set is searched for plans that are faster than those of
    the sets before; `hand` has the best one of each in which there was one.
    """
    asked: dict[str, Any] = {"progress": progress, "predict": predict, "watch": watch}
    if cluster.groups is None or mesh.num_devices != cluster.num_devices or request.shares:
        return choose_plan(graph, mesh, cluster, request, **asked)
    start_s, found, notes = perf_counter(), dict[str, Plan | StagedPlan](), list[str]()
    failure: InfeasibleError | None = None
    members = cluster.groups.members
    for kept in _sets(members):
        name, is_all = " + ".join(f"{count} {one.name}" for count, one in kept), len(kept) == len(members)
        here = _without_ranks(mesh, sum(count for count, _ in kept))
        least_s = speeds_floor_s(graph, replace(cluster.groups, members=kept), request.training)
        if here is None:
            continue
        to_beat_s = min((plan.step_s for plan in found.values()), default=math.inf)
        if least_s >= to_beat_s:
            notes.append(f"{name} alone take {format_seconds(least_s)} at least")
            continue
        left_s = max(0.0, request.time_limit_s - (perf_counter() - start_s))
        limit_s = left_s * (_SHARE_OF_ALL if is_all else 1.0)
        part = replace(request, time_limit_s=limit_s, any_order=isinstance(mesh, Devices))
        own = kept[0][1] if len(kept) == 1 else cluster if is_all else joined(kept, cluster.groups.link)
        try:
            found[name] = choose_plan(graph, here, own, part, to_beat_s=to_beat_s, **asked)
        except InfeasibleError as error:
            failure = failure or error
            notes.append(f"no {'faster ' * bool(found)}plan was found on {name}")
    if not found:
        assert failure is not None, "there is a set of groups"
        raise failure
    return _told(graph, cluster, found, notes, request.training)


def _told(
    graph: Graph, cluster: Cluster, found: dict[str, Plan | StagedPlan], notes: Sequence[str], training: Training
) -> Plan | StagedPlan:
    """The fastest plan, with the other ones beside it and the bound of all."""
    assert cluster.groups is not None, "a cluster of groups"
    chosen = min(found, key=lambda name: found[name].step_s)
    plan = found.pop(chosen)
    others = {f"on {name}": HandCosts(other.step_s, max(other.memory_bytes)) for name, other in found.items()}
    if plan.mesh.num_devices < cluster.num_devices:
        notes = (f"on {chosen} of {cluster.name}: with more of these devices no faster plan was found", *notes)
    floor_s = min(speeds_floor_s(graph, cluster.groups, training), plan.step_s)
    told = "; ".join((plan.found_by, *notes))
    return replace(plan, found_by=told, hand=dict(plan.hand) | others, lower_bound_s=floor_s, bound_of=ANY_SHARES)


def _sets(members: tuple[Member, ...]) -> Iterator[tuple[Member, ...]]:
    """The sets of groups, all of them first."""
    for size in range(len(members), 0, -1):
        yield from combinations(members, size)


def _without_ranks(mesh: Mesh | Devices, count: int) -> Mesh | Devices | None:
    """The mesh of `count` of the devices, with a shorter first axis; None if that has no whole number of ranks then."""
    if isinstance(mesh, Devices):
        return replace(mesh, num_devices=count) if count == mesh.num_devices else Devices(count)
    inner = mesh.num_devices // mesh.shape[0]
    return None if count % inner else replace(mesh, shape=(count // inner, *mesh.shape[1:]))
