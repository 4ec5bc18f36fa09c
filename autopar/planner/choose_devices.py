"""`choose_devices`: the best plan on all groups of a cluster's devices or on some, where the others would slow it."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from time import perf_counter
from typing import Any

from autopar.costmodel.cluster.device_groups import joined
from autopar.costmodel.cluster.hardware import Cluster, DeviceGroups
from autopar.costmodel.training import Training
from autopar.costmodel.work_bound import speeds_floor_s
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.planner.budget import Progress, Watch
from autopar.planner.choose import choose_plan
from autopar.planner.fit_memory import AfterOthers, Predict
from autopar.planner.groups_in_microbatches import ANY_SHARES
from autopar.planner.request import ANYTHING, PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import StagedPlan
from autopar.units import format_seconds

Members = tuple[tuple[int, Cluster], ...]  # as of `DeviceGroups`
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
    sets = _Sets(graph, mesh, cluster, request, asked)
    for kept in (cluster.groups.members, *_some_of(cluster.groups.members)):
        sets.plan(kept)
    if not sets.found:
        assert sets.failure is not None, "there is a set of groups"
        raise sets.failure
    found = {sets.name_of(kept): plan for kept, plan in sorted(sets.found.items(), key=lambda one: -len(one[0]))}
    return _told(graph, cluster, found, sets.notes.values(), request.training)


@dataclass
class _Sets:
    """The search of sets of groups.

    `found`: the plans, `notes`: what is told of other sets, `planned`: the step that a plan on a set had to beat.
    """

    graph: Graph
    mesh: Mesh | Devices
    cluster: Cluster
    request: PlanRequest
    asked: Mapping[str, Any]
    found: dict[Members, Plan | StagedPlan] = field(default_factory=dict)
    notes: dict[Members, str] = field(default_factory=dict)
    planned: dict[Members, float] = field(default_factory=dict)
    failure: InfeasibleError | None = None
    start_s: float = field(default_factory=perf_counter)

    @property
    def groups(self) -> DeviceGroups:
        assert self.cluster.groups is not None, "a cluster of groups"
        return self.cluster.groups

    def name_of(self, kept: Members) -> str:
        return " + ".join(f"{count} {one.name}" for count, one in kept)

    def least_s(self, expected_s: float) -> float:
        """The least step of plans on some of the groups, which are looked for where all take `expected_s`."""
        for kept in _some_of(self.groups.members):
            self.plan(kept, expected_s)
        return min((plan.step_s for plan in self.found.values()), default=math.inf)

    def plan(self, kept: Members, expected_s: float = math.inf) -> None:
        """Plan a set, unless that was done for plans as slow; `expected_s`: the step that is known of another set."""
        here = _without_ranks(self.mesh, sum(count for count, _ in kept))
        to_beat_s = min((plan.step_s for other, plan in self.found.items() if other != kept), default=math.inf)
        to_beat_s = min(to_beat_s, expected_s)
        if here is None or self.planned.get(kept, -1.0) >= to_beat_s or self._is_known(kept):
            return
        self.planned[kept], name = to_beat_s, self.name_of(kept)
        self.found.pop(kept, None)  # its peak was not predicted
        least_s = speeds_floor_s(self.graph, replace(self.groups, members=kept), self.request.training)
        if least_s >= to_beat_s:
            self.notes[kept] = f"{name} alone take {format_seconds(least_s)} at least"
            return
        try:
            self.found[kept] = self._choose(kept, here, to_beat_s, is_in_between=expected_s < math.inf)
            self.notes.pop(kept, None)
        except InfeasibleError as error:
            self.failure = self.failure or error
            self.notes[kept] = f"no {'faster ' * (to_beat_s < math.inf)}plan was found on {name}"

    def _is_known(self, kept: Members) -> bool:
        """Whether the best plan on a set is known: that which was faster than what it had to beat."""
        return kept in self.found and self.found[kept].step_s < self.planned[kept]

    def _choose(
        self, kept: Members, here: Mesh | Devices, to_beat_s: float, *, is_in_between: bool
    ) -> Plan | StagedPlan:
        """`choose_plan` on a set; all groups ask for plans on some of them before a peak is predicted."""
        asked, is_all = dict(self.asked), kept == self.groups.members
        if is_all and isinstance(here, Mesh) and asked["predict"] is not None:
            asked["predict"] = AfterOthers(asked["predict"], self.least_s)
        left_s = max(0.0, self.request.time_limit_s - (perf_counter() - self.start_s))
        share = _SHARE_OF_ALL if is_all else 1 - _SHARE_OF_ALL if is_in_between else 1.0
        part = replace(self.request, time_limit_s=share * left_s, any_order=isinstance(self.mesh, Devices))
        own = kept[0][1] if len(kept) == 1 else self.cluster if is_all else joined(kept, self.groups.link)
        return choose_plan(self.graph, here, own, part, to_beat_s=to_beat_s, **asked)


def _told(
    graph: Graph, cluster: Cluster, found: dict[str, Plan | StagedPlan], notes: Iterable[str], training: Training
) -> Plan | StagedPlan:
    """The fastest plan, with the other ones beside it and the bound of all."""
    assert cluster.groups is not None, "a cluster of groups"
    chosen = min(found, key=lambda name: found[name].step_s)
    plan = found.pop(chosen)
    others = {f"on {name}": HandCosts(other.step_s, max(other.memory_bytes)) for name, other in found.items()}
    told = [*notes]
    if plan.mesh.num_devices < cluster.num_devices:
        told.insert(0, f"on {chosen} of {cluster.name}: with more of these devices no faster plan was found")
    floor_s = min(speeds_floor_s(graph, cluster.groups, training), plan.step_s)
    return replace(
        plan,
        found_by="; ".join((plan.found_by, *told)),
        hand=dict(plan.hand) | others,
        lower_bound_s=floor_s,
        bound_of=ANY_SHARES,
    )


def _some_of(members: Members) -> Iterator[Members]:
    """The sets of some of the groups, large ones first."""
    for size in range(len(members) - 1, 0, -1):
        yield from combinations(members, size)


def _without_ranks(mesh: Mesh | Devices, count: int) -> Mesh | Devices | None:
    """The mesh of `count` of the devices, with a shorter first axis; None if that has no whole number of ranks then."""
    if isinstance(mesh, Devices):
        return replace(mesh, num_devices=count) if count == mesh.num_devices else Devices(count)
    inner = mesh.num_devices // mesh.shape[0]
    return None if count % inner else replace(mesh, shape=(count // inner, *mesh.shape[1:]))
