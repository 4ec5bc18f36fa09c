"""Plans for groups of devices that differ: the shares of the batch, and layouts that are priced as the slowest rank.

In given shares each group of devices is a search of its own, on the mesh and cluster as its ranks see them. No plan
takes less than the largest of their bounds, for it takes at least what it takes each group; so the groups are searched
one after the other until a plan is as fast as that. Shares follow from the speeds that the groups have under the plan,
and the plan is searched again in them. What holds for any shares and layouts is the sum of the speeds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from autopar.costmodel.cluster.device_groups import ranks_of, seen_by
from autopar.costmodel.cluster.hardware import Cluster, DeviceGroups
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.work_bound import work_s
from autopar.errors import InfeasibleError, MeshError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.planner.budget import Budget
from autopar.planner.fit_memory import Predict
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.problem import ENOUGH_GAP
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.plans.seen_rank import in_shares, view_of
from autopar.plans.serialise import HandCosts
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import format_shares
from autopar.shares.device_shares import DeviceSpeed, best_shares, proportional_shares
from autopar.units import format_bytes, format_seconds

# What a bound of the sum of speeds is of.
ANY_SHARES = "plan on these devices or some of them"
# Searches in other shares; a further one is worth its time if the step in them is shorter by more than a share.
_MOST_SEARCHES, _WORTH = 4, 0.002
# Rounds in which shares follow from the speeds in the shares before.
_MOST_ROUNDS = 6
_SHARE_OF_SEARCH = 0.5
# If the rows of a group exceed its memory, this share of them is tried.
_FEWER = 0.85


def best_on_groups(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest,
    *,
    budget: Budget,
    predict: Predict | None,
) -> tuple[Plan, bool]:
    """The best plan of `graph` on any of the meshes, and whether memory keeps a group from having more rows."""
    best: Plan | None = None
    is_capped = False
    failure: InfeasibleError | None = None
    meshes = list(_meshes(mesh, cluster))
    for number, one in enumerate(meshes):
        if budget.is_spent and best is not None:
            break
        part = budget.part(1 / (len(meshes) - number))
        try:
            search = _OnMesh(graph, one, cluster, request, part, predict)
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


@dataclass
class _OnMesh:
    """The search on one mesh. `most_rows`: group -> rows of a rank that its memory holds, as far as that is known;
    `exceeded`: the group whose memory the last plan exceeded that fits in no other shares.
    """

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    request: PlanRequest
    budget: Budget
    predict: Predict | None
    most_rows: dict[int, int] = field(default_factory=dict)
    exceeded: int = 0
    is_capped: bool = False  # memory keeps a group from having the rows that its speed asks for

    @cached_property
    def groups(self) -> DeviceGroups:
        assert self.cluster.groups is not None, "a cluster of groups"
        return self.cluster.groups

    @cached_property
    def ranks(self) -> tuple[range, ...]:
        """The ranks of each group on the first axis."""
        try:
            return ranks_of(self.cluster, self.mesh.shape[0])
        except ValueError as error:
            raise MeshError(f"mesh {self.mesh}: {error}") from error

    @cached_property
    def num_rows(self) -> int:
        """The rows of the batch; 0 if they are too few for a row each, so that there are no shares."""
        rows = next((item.value.shape[0] for item in self.graph.of_kind("argument") if item.value.shape), 0)
        return rows if rows >= self.mesh.shape[0] > 1 else 0

    def best(self) -> Plan:
        """The best plan found; InfeasibleError if there is none."""
        best: Plan | None = None
        sizes, num_searched = self._first_sizes(), 0
        while num_searched < _MOST_SEARCHES and not (self.budget.is_spent and best):
            try:
                found = self._searched(sizes)
            except _TooMany as error:
                if best is not None:
                    break
                sizes = self._fewer(sizes, error)
                continue
            num_searched += 1
            best = found if best is None or found.step_s < best.step_s else best
            if self.mesh.shares or not self.num_rows:
                break
            balanced = self._balanced(found)
            if balanced.step_s > found.step_s * (1 - _WORTH):
                break
            best = min(best, self._fitting(balanced) or best, key=lambda plan: plan.step_s)
            ((_, rows),) = balanced.mesh.shares
            sizes = tuple(rows)
        assert best is not None, "without a plan there is an error"
        return replace(best, hand=dict(best.hand) | self._in_other_shares(best))

    def _fewer(self, sizes: tuple[int, ...], error: "_TooMany") -> tuple[int, ...]:
        """Shares with fewer rows for the group of the error, which is raised if there are none, or time is up."""
        most = max(sizes[rank] for rank in self.ranks[error.group]) if sizes else 1
        if self.mesh.shares or most <= 1 or self.budget.is_spent:
            raise error.reason
        self.most_rows[error.group], self.is_capped = min(most - 1, int(_FEWER * most)), True
        try:
            return self._shares([DeviceSpeed(row_s) for row_s in self._rows_s])
        except InfeasibleError:
            held = " and ".join(f"{rows} rows on {self._name(group)}" for group, rows in sorted(self.most_rows.items()))
            raise InfeasibleError(
                f"no shares of the {self.num_rows} rows of the batch were found that fit in the memory of the groups:"
                f" no plan was found with more than {held} for each rank of the first mesh axis; take a smaller batch,"
                f" or more devices. The last reason: {error.reason}"
            ) from error

    def _first_sizes(self) -> tuple[int, ...]:
        if self.mesh.shares:
            return self.mesh.shares[0][1]
        return self._shares([DeviceSpeed(row_s) for row_s in self._rows_s]) if self.num_rows else ()

    @cached_property
    def _rows_s(self) -> tuple[float, ...]:
        """Seconds of a row on a device of each group, by its share of all work."""
        each = (sum(work_s(self.graph, one, self.request.training)) for _, one in self.groups.members)
        return tuple(max(one / max(1, self.num_rows), 1e-15) for one in each)

    def _shares(self, speeds: Sequence[DeviceSpeed]) -> tuple[int, ...]:
        """The best shares for the speeds of the groups, with a row each at least."""
        devices = [
            replace(speeds[group], most_rows=self.most_rows.get(group))
            for group, own in enumerate(self.ranks)
            for _ in own
        ]
        sizes = list(best_shares(self.num_rows, devices).sizes)
        self.is_capped |= any(size == device.most_rows for size, device in zip(sizes, devices))
        for rank in (rank for rank, size in enumerate(sizes) if not size):
            sizes[sizes.index(max(sizes))] -= 1
            sizes[rank] = 1
        return tuple(sizes)

    def _searched(self, sizes: tuple[int, ...]) -> Plan:
        """The best plan in these shares that fits in every group's memory."""
        mesh = replace(self.mesh, shares=((0, sizes),) if sizes else ())
        bound_s, plans, tried = 0.0, list[Plan](), list[Assignment]()
        for group in self._largest_first():
            request, there = self._request_of(group), seen_by(self.cluster, group)
            part = self.budget.part(_SHARE_OF_SEARCH)
            try:
                found = make_plan(
                    self.graph, view_of(mesh, self.cluster, group), there, request, budget=part, predict=self.predict
                )
            except InfeasibleError as error:
                raise _TooMany(group, InfeasibleError(f"{self._name(group)}: {error}")) from error
            bound_s = max(bound_s, found.lower_bound_s)
            plan = self._of(found, mesh)
            if plan.assignment not in tried and (fitting := self._fitting(plan, found)) is not None:
                plans.append(replace(fitting, found_by=found.found_by))
            tried.append(plan.assignment)
            if plans and min(one.step_s for one in plans) * (1 - ENOUGH_GAP) <= bound_s:
                break
        if not plans:
            raise _TooMany(self.exceeded, self._refusal(sizes))
        best = min(plans, key=lambda plan: plan.step_s)
        least = format_seconds(min(bound_s, best.step_s))
        return replace(best, found_by=f"{best.found_by}, and no plan in these shares in less than {least}")

    def _largest_first(self) -> list[int]:
        return sorted(range(len(self.groups.members)), key=lambda group: -self.groups.members[group][0])

    def _of(self, found: Plan, mesh: Mesh) -> Plan:
        """The plan with the choices of `found` in the shares of `mesh`, as the slowest rank sees it."""
        choices = in_shares(found.assignment, dict(mesh.shares)) if mesh.shares else found.assignment
        return plan_of(self.graph, choices, mesh, self.cluster, training=self.request.training)

    def _views(self, plan: Plan) -> Iterator[Plan]:
        """The plan as each group sees it, with its memory limit."""
        for group in range(len(self.groups.members)):
            mesh, there = view_of(plain(plan.mesh), self.cluster, group), seen_by(self.cluster, group)
            choices = in_shares(plan.assignment, dict(mesh.shares)) if mesh.shares else plan.assignment
            limit = {"memory_limit_bytes": self._limit(group), "training": plan.training}
            yield plan_of(self.graph, choices, mesh, there, **limit)

    def _fitting(self, plan: Plan, known: Plan | None = None) -> Plan | None:
        """The plan with its peak if it fits in every group's memory, else None; `known`: as a group saw it before."""
        peaks, limit = [], plan.memory_limit_bytes
        for group, view in enumerate(self._views(plan)):
            peak = max(self._peaks(self.predict, view, known) if self.predict else view.memory_bytes)
            if peak > view.memory_limit_bytes:
                self.exceeded = group
                return None
            if view.cluster == plan.cluster:
                peaks, limit = [peak] if self.predict else [], view.memory_limit_bytes
        return replace(plan, peak_bytes=tuple(peaks), memory_limit_bytes=limit)

    @staticmethod
    def _peaks(predict: Predict, view: Plan, known: Plan | None) -> Sequence[int]:
        """The predicted peaks of what a group sees, which need not be predicted again where `known` is the same."""
        if known is not None and known.peak_bytes:
            choices = (known.mesh, known.cluster, known.assignment, known.training)
            if choices == (view.mesh, view.cluster, view.assignment, view.training):
                return known.peak_bytes
        return predict(view)

    def _balanced(self, plan: Plan) -> Plan:
        """The same choices in the shares that follow from the speeds of the groups, as often as that gains."""
        best = plan
        for _ in range(_MOST_ROUNDS):
            try:
                sizes = self._shares([self._speed(best, view, group) for group, view in enumerate(self._views(best))])
            except InfeasibleError:
                break
            tried = self._of(best, replace(self.mesh, shares=((0, sizes),)))
            if tried.step_s >= best.step_s:
                break
            best = tried
        return replace(best, found_by=plan.found_by, hand=plan.hand)

    def _speed(self, plan: Plan, view: Plan, group: int) -> DeviceSpeed:
        """The seconds of a group's rank by its rows, from two numbers of rows; notes how many its memory holds."""
        ((_, rows),) = plan.mesh.shares
        seen = max(self.ranks[group], key=rows.__getitem__)
        here, there = rows[seen], rows[seen] // 2 if rows[seen] > 1 else 2
        other = max((rank for rank in range(len(rows)) if rank != seen), key=rows.__getitem__)
        sizes = [there if rank == seen else size for rank, size in enumerate(rows)]
        sizes[other] = max(1, rows[other] + here - there)
        mesh = replace(self.mesh, shares=((0, tuple(sizes)),))
        moved = list(self._views(replace(plan, mesh=mesh)))[group]
        row_s = max((view.step_s - moved.step_s) / (here - there), 1e-15)
        row_bytes = max((view.memory_bytes[0] - moved.memory_bytes[0]) / (here - there), 1e-9)
        spare = self._limit(group) - view.memory_bytes[0]
        self.most_rows[group] = max(1, min(self.num_rows, math.floor(here + spare / row_bytes)))
        return DeviceSpeed(row_s, max(0.0, view.step_s - row_s * here))

    def _in_other_shares(self, plan: Plan) -> dict[str, HandCosts]:
        """The same choices in equal shares, and by peak flop/s (Jia et al., "Whale", USENIX ATC 2022, section 4.2)."""
        if not self.num_rows or self.mesh.shares:
            return {}
        dtype = next((item.value.dtype for item in self.graph.of_kind("parameter")), torch.float32)
        peaks = [
            self.groups.members[group][1].peak_flops_per_s(dtype) for group, own in enumerate(self.ranks) for _ in own
        ]
        found = {}
        for name, weights in {"equal shares": [1.0] * len(peaks), "shares by peak flop/s (Whale)": peaks}.items():
            sizes = proportional_shares(self.num_rows, weights)
            if min(sizes) > 0:
                priced = self._of(plan, replace(self.mesh, shares=((0, sizes),)))
                found[f"this plan in {name}"] = HandCosts(priced.step_s, priced.memory_bytes[0])
        return found

    def _limit(self, group: int) -> float:
        usable = usable_memory_bytes(self.groups.members[group][1])
        asked = self.request.memory_limit_bytes
        return usable if asked is None else min(asked, usable)

    def _request_of(self, group: int) -> PlanRequest:
        return replace(self.request, shares=(), memory_limit_bytes=self._limit(group))

    def _name(self, group: int) -> str:
        count, one = self.groups.members[group]
        return f"group {group + 1} ({count} {one.name})"

    def _refusal(self, sizes: tuple[int, ...]) -> InfeasibleError:
        limits = ", ".join(f"{self._name(group)} {format_bytes(self._limit(group))}" for group in self._largest_first())
        return InfeasibleError(
            f"no plan found in shares {format_shares(sizes) if sizes else 'of equal size'} fits in the memory of every"
            f" group ({limits}): the plans that fit in others exceed that of {self._name(self.exceeded)}; take a"
            " smaller batch, or leave that group out"
        )


class _TooMany(Exception):
    """The rows of a group are more than its memory holds, or no plan fits there at all."""

    def __init__(self, group: int, reason: InfeasibleError) -> None:
        super().__init__(str(reason))
        self.group, self.reason = group, reason


def plain(mesh: Mesh) -> Mesh:
    """`mesh` with its shares as no rank in particular sees them."""
    return replace(mesh, shares=tuple((axis, tuple(rows)) for axis, rows in mesh.shares))
