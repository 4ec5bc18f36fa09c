"""Plans for groups of devices that differ: the shares of the batch, and layouts that are priced as the slowest rank.

In given shares each group of devices is a search of its own, on the mesh and cluster as its ranks see them. No plan
takes less than the largest of their bounds, for it takes at least what it takes each group; so the groups are searched
one after the other until a plan is as fast as that. Shares follow from the speeds that the groups have under the plan,
and the plan is searched again in them. What holds for any shares and layouts is the sum of the speeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from autopar.costmodel.cluster.device_groups import ranks_of, seen_by
from autopar.costmodel.cluster.hardware import Cluster, DeviceGroups
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.work_bound import least_saved_bytes, work_s
from autopar.errors import InfeasibleError, MeshError
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.fit_memory import AfterOthers, Predict
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.problem import ENOUGH_GAP
from autopar.planner.request import PlanRequest
from autopar.planner.seen_by_groups import InMore, KnownChoices, PlanOnGroups, RowCosts, TooMany, by_parts, rows_seen
from autopar.plans.fit_assignment import fit_assignment
from autopar.plans.plan import Plan, plan_of
from autopar.plans.seen_rank import in_shares, view_of
from autopar.plans.serialise import HandCosts
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import format_shares
from autopar.shares.device_shares import DeviceSpeed, best_shares, proportional_shares
from autopar.units import format_bytes, format_seconds

# Searches in other shares; a further one is worth its time if the step in them is shorter by more than a share.
_MOST_SEARCHES, _WORTH = 4, 0.002
# Rounds in which shares follow from the speeds in the shares before.
_MOST_ROUNDS = 6
_SHARE_OF_SEARCH = 0.5
# If the rows of a group exceed its memory, this share of them is tried.
_FEWER = 0.85
# Memory below this share of the limit, by the estimate, is clearly within it.
_CLEAR = 0.9


@dataclass
class OnMesh:
    """The search on one mesh. `most_rows`: group -> rows of a rank that its memory holds, as far as that is known;
    `exceeded`: the group whose memory the last plan exceeded that fits in no other shares. `in_more`: given if more
    microbatches may be tried. `start`: what is priced in place of a search of its shares.
    """

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    request: PlanRequest
    budget: Budget
    predict: Predict | None
    to_beat_s: float = math.inf
    in_more: InMore | None = None
    start: KnownChoices | None = None
    is_first: bool = True  # whether no plan was tried in more microbatches
    most_rows: dict[int, int] = field(default_factory=dict)
    known: tuple[Plan, PlanOnGroups] | None = None  # the last plan that a group's search found, as all see it
    predicted: list[tuple[Plan, tuple[int, ...]]] = field(default_factory=list)
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
        best: PlanOnGroups | None = None
        sizes, num_searched = self._first_sizes(), 0
        while num_searched < _MOST_SEARCHES and not (self.budget.is_spent and best):
            try:
                found = self._searched(sizes)
            except TooMany as error:
                if best is not None:
                    break
                sizes = self._fewer(sizes, error)
                continue
            num_searched += 1
            best = found if best is None or found.plan.step_s < best.plan.step_s else best
            if self.mesh.shares or not self.num_rows or best.plan.lower_bound_s >= self.to_beat_s:
                break
            balanced = self._balanced(found)
            if balanced.plan.step_s > found.plan.step_s * (1 - _WORTH):
                break
            if (fitting := self._fitting(balanced)) is not None and fitting.step_s < best.plan.step_s:
                best = replace(balanced, plan=fitting)
            ((_, sizes),) = plain(balanced.plan.mesh).shares
        assert best is not None, "without a plan there is an error"
        if best.plan.step_s >= self.to_beat_s:
            return best.plan
        return replace(best.plan, hand=dict(best.plan.hand) | self._in_other_shares(best))

    def _fewer(self, sizes: tuple[int, ...], error: TooMany) -> tuple[int, ...]:
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
        if self.start is not None:
            return self.start.sizes
        if self.mesh.shares:
            return self.mesh.shares[0][1]
        return self._shares([DeviceSpeed(row_s) for row_s in self._rows_s]) if self.num_rows else ()

    @cached_property
    def _rows_s(self) -> tuple[float, ...]:
        """Seconds of a row on a device of each group, by its share of all work."""
        each = (sum(work_s(self.graph, one, self.request.training)) for _, one in self.groups.members)
        return tuple(max(one / max(1, self.num_rows), 1e-15) for one in each)

    def _shares(self, speeds: Sequence[DeviceSpeed], *, in_memory: bool = True) -> tuple[int, ...]:
        """The best shares for the speeds of the groups, with a row each at least, and within what memory holds."""
        devices = [
            replace(speeds[group], most_rows=self.most_rows.get(group) if in_memory else None)
            for group, own in enumerate(self.ranks)
            for _ in own
        ]
        sizes = list(best_shares(self.num_rows, devices).sizes)
        if any(size == device.most_rows for size, device in zip(sizes, devices)):
            free = best_shares(self.num_rows, [replace(device, most_rows=None) for device in devices])
            self.is_capped |= free.sizes != tuple(sizes)
        for rank in (rank for rank, size in enumerate(sizes) if not size):
            sizes[sizes.index(max(sizes))] -= 1
            sizes[rank] = 1
        return tuple(sizes)

    def _searched(self, sizes: tuple[int, ...]) -> PlanOnGroups:
        """The best plan in these shares that fits in every group's memory.

        The group that is expected to be the slowest is searched first: if it is, its plan is the best.
        """
        mesh = replace(self.mesh, shares=((0, sizes),) if sizes else ())
        if self.start is not None and sizes == self.start.sizes:
            return self._started(self.start, mesh)
        self._check_floor(mesh)
        bound_s, plans, tried = 0.0, list[PlanOnGroups](), list[Assignment]()
        for group in self._slowest_first(sizes):
            request, there = self._request_of(group), seen_by(self.cluster, group)
            part = self.budget.part(_SHARE_OF_SEARCH)
            try:
                predict = None if self.predict is None else partial(self._peaks_there, mesh, group)
                asked: dict[str, Any] = {"budget": part, "predict": predict, "to_beat_s": self.to_beat_s}
                found = make_plan(self.graph, view_of(mesh, self.cluster, group), there, request, **asked)
            except InfeasibleError as error:
                raise TooMany(group, InfeasibleError(f"{self._name(group)}: {error}")) from error
            bound_s = max(bound_s, found.lower_bound_s)
            seen, choices = self._seen_of(found, mesh), self._choices(found, mesh)
            if choices not in tried:
                if bound_s >= self.to_beat_s:
                    return replace(seen, plan=replace(seen.plan, found_by=found.found_by, lower_bound_s=bound_s))
                if seen.is_over:  # its peak may be lower
                    self._try_in_more(found, seen, bound_s)
                if (fitting := self._fitting(seen)) is not None:
                    plans.append(replace(seen, plan=replace(fitting, found_by=found.found_by)))
                else:
                    self._try_in_more(found, seen, bound_s)
            tried.append(choices)
            if plans and min(one.plan.step_s for one in plans) * (1 - ENOUGH_GAP) <= bound_s:
                break
        if not plans:
            raise TooMany(self.exceeded, self._refusal(sizes))
        best = min(plans, key=lambda one: one.plan.step_s)
        least = format_seconds(min(bound_s, best.plan.step_s))
        told = f"{best.plan.found_by}, and no plan in these shares in less than {least}"
        return replace(best, plan=replace(best.plan, found_by=told))

    def _started(self, start: KnownChoices, mesh: Mesh) -> PlanOnGroups:
        """The plan of the choices of `start`; InfeasibleError if it exceeds a group's memory."""
        choices = fit_assignment(in_shares(start.choices, dict(mesh.shares)), self.graph, mesh)
        seen = self._seen(choices, mesh)
        if seen.plan.step_s >= self.to_beat_s:
            return replace(seen, plan=replace(seen.plan, lower_bound_s=seen.plan.step_s))
        if seen.is_over or (fitting := self._fitting(seen)) is None:
            raise InfeasibleError("the same choices in more microbatches exceed the memory of a group")
        return replace(seen, plan=replace(fitting, found_by=start.found_by))

    def _try_in_more(self, found: Plan, seen: PlanOnGroups, least_s: float) -> None:
        """Try the first plan that a group's search finds, `seen` by all, in more microbatches: it exceeds the memory of
        another group. MadeInMore if it takes hardly longer than `least_s`, and other shares would not be tried.
        """
        is_first, self.is_first = self.is_first, False
        if self.in_more is None or not is_first or not self.num_rows or self.mesh.shares or self.budget.is_spent:
            return
        speeds = [by_parts(view).speed(view) for view in seen.views]
        sizes = self._shares(speeds, in_memory=False)
        best_s = max(speeds[group].step_s(sizes[rank]) for group, own in enumerate(self.ranks) for rank in own)
        binds = sum(found.memory_bytes) > _CLEAR * found.memory_limit_bytes
        if not binds and best_s > seen.plan.step_s * (1 - _WORTH):
            ((_, sizes),) = plain(seen.plan.mesh).shares
            self.in_more(KnownChoices(seen.plan.assignment, sizes, found.found_by), least_s)

    def _check_floor(self, mesh: Mesh) -> None:
        """TooMany if more microbatches may be tried, and a rank of a group saves more than its limit in any plan."""
        for group in range(len(self.ranks) if self.in_more is not None else 0):
            least_bytes = least_saved_bytes(self.graph, view_of(mesh, self.cluster, group))
            if least_bytes > self._limit(group):
                saved = f"saves {format_bytes(least_bytes)} of activations at least without more microbatches"
                raise TooMany(group, InfeasibleError(f"{self._name(group)}: a device {saved}"))

    def _slowest_first(self, sizes: tuple[int, ...]) -> list[int]:
        """The groups by the seconds that the work of their rows takes; of equals the one with the most devices."""
        rows = [max(sizes[rank] for rank in own) if sizes else 1 for own in self.ranks]
        return sorted(
            range(len(rows)), key=lambda group: (-rows[group] * self._rows_s[group], -self.groups.members[group][0])
        )

    def _choices(self, found: Plan, mesh: Mesh) -> Assignment:
        """The choices of a plan that a group's search found, as no rank in particular sees them."""
        return in_shares(found.assignment, dict(mesh.shares)) if mesh.shares else found.assignment

    def _seen_of(self, found: Plan, mesh: Mesh) -> PlanOnGroups:
        """The plan that a group's search found as each group sees it."""
        if self.known is None or (self.known[0].assignment, self.known[0].mesh) != (found.assignment, found.mesh):
            self.known = found, self._seen(self._choices(found, mesh), mesh, found)
        return self.known[1]

    def _peaks_there(self, mesh: Mesh, group: int, found: Plan) -> tuple[int, ...]:
        """The peaks of a plan of `group`, or of the rank with the most rows, which are no lower and are asked for in
        any case, if they are within the group's limit.

        Where no other shares would be tried, other devices are planned first: of a plan that is slower than those on
        them the estimate will do, which is within the limit.
        """
        seen = self._seen_of(found, mesh)
        if isinstance(self.predict, AfterOthers) and self._is_settled(seen):
            self.to_beat_s = min(self.to_beat_s, self.predict.least_s(seen.plan.step_s))
            if found.lower_bound_s >= self.to_beat_s:
                return found.memory_bytes
        own = seen.views[group]
        most = max(seen.views, key=lambda view: (rows_seen(view), view is own))
        is_clear = most is not own and sum(own.memory_bytes) <= _CLEAR * self._limit(group)
        if is_clear and self.is_first and self.in_more is not None and seen.is_over:
            return own.memory_bytes  # it is tried in more microbatches before a peak is predicted
        peaks = self._peaks(most)
        if max(peaks) <= self._limit(group):
            return peaks
        # One that exceeds the memory of other ranks is no plan.
        return own.memory_bytes if is_clear and max(peaks) > most.memory_limit_bytes else self._peaks(own)

    def _is_settled(self, seen: PlanOnGroups) -> bool:
        """Whether no other shares would be tried for a plan."""
        try:
            sizes = self._balanced_sizes(seen, [by_parts(view) for view in seen.views]) if self.num_rows else ()
        except InfeasibleError:
            return False
        return not sizes or plain(seen.plan.mesh).shares == ((0, sizes),)

    def _peaks(self, view: Plan) -> tuple[int, ...]:
        """The predicted peaks of a view, each predicted once."""
        assert self.predict is not None, "peaks are asked for"
        found = next((peaks for one, peaks in self.predicted if one is view), None)
        if found is None:
            found = self.predict(view)
            self.predicted.append((view, found))
        return found

    def _seen(self, choices: Assignment, mesh: Mesh, known: Plan | None = None) -> PlanOnGroups:
        """The plan of these choices in the shares of `mesh`; `known`: one that a group sees, which may be of them."""
        views = tuple(self._view(choices, mesh, group, known) for group in range(len(self.ranks)))
        return PlanOnGroups(max(views, key=lambda view: view.step_s), views)

    def _view(self, choices: Assignment, mesh: Mesh, group: int, known: Plan | None = None) -> Plan:
        """The plan as a group sees it, with its memory limit; `known`: as of `_seen`."""
        own, there = view_of(mesh, self.cluster, group), seen_by(self.cluster, group)
        here = in_shares(choices, dict(own.shares)) if own.shares else choices
        limit: dict[str, Any] = {"memory_limit_bytes": self._limit(group), "training": self.request.training}
        if known is None or (known.mesh, known.cluster, known.assignment) != (own, there, here):
            return plan_of(self.graph, here, own, there, **limit)
        return replace(plan_of(self.graph, here, own, there, **limit, costs=known.costs), peak_bytes=known.peak_bytes)

    def _fitting(self, seen: PlanOnGroups) -> Plan | None:
        """The plan with its peak if it fits in every group's memory, else None.

        Another rank has no larger peak than one with as many rows or more, so that it is not predicted where that fits,
        and the plan has the larger one.
        """
        most, peaks = math.inf, ()
        for view in sorted(seen.views, key=lambda view: (-rows_seen(view), view is not seen.plan)):
            if self.predict is None:
                peak = sum(view.memory_bytes)
            elif most <= view.memory_limit_bytes:
                continue
            else:
                found = self._peaks(view)
                peak = max(found)
                most = min(most, peak)
                is_own = view is seen.plan or (not peaks and peak <= seen.plan.memory_limit_bytes)
                peaks = found if is_own else peaks
            if peak > view.memory_limit_bytes:
                self.exceeded = next(group for group, one in enumerate(seen.views) if one is view)
                return None
        return replace(seen.plan, peak_bytes=peaks)

    def _balanced(self, seen: PlanOnGroups) -> PlanOnGroups:
        """The same choices in the shares that follow from the speeds of the groups, as often as that gives others."""
        best, now = seen, seen
        costs = [by_parts(view) for view in seen.views]
        for _ in range(_MOST_ROUNDS):
            try:
                sizes = self._balanced_sizes(now, costs)
            except InfeasibleError:
                break
            before, now = now, self._in_sizes(now, sizes)
            if now is before:
                break
            costs = [of_row.learned(*views) for of_row, views in zip(costs, zip(before.views, now.views))]
            best = now if now.plan.step_s < best.plan.step_s else best
        return replace(best, plan=replace(best.plan, found_by=seen.plan.found_by, hand=seen.plan.hand))

    def _balanced_sizes(self, seen: PlanOnGroups, costs: Sequence[RowCosts]) -> tuple[int, ...]:
        """The shares that follow from the costs of a row of each group; InfeasibleError if memory holds none."""
        for group, view in enumerate(seen.views):
            row_bytes, spare = costs[group].row_bytes, self._limit(group) - view.memory_bytes[0]
            self.most_rows[group] = max(1, min(self.num_rows, math.floor(rows_seen(view) + spare / row_bytes)))
        return self._shares([of_row.speed(view) for of_row, view in zip(costs, seen.views)])

    def _in_sizes(self, seen: PlanOnGroups, sizes: tuple[int, ...]) -> PlanOnGroups:
        """The same choices in shares of these sizes."""
        if plain(seen.plan.mesh).shares == ((0, sizes),):
            return seen
        return self._seen(in_shares(seen.plan.assignment, {0: sizes}), replace(self.mesh, shares=((0, sizes),)))

    def _in_other_shares(self, seen: PlanOnGroups) -> dict[str, HandCosts]:
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
                priced = self._in_sizes(seen, sizes).plan
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
        groups = range(len(self.ranks))
        limits = ", ".join(f"{self._name(group)} {format_bytes(self._limit(group))}" for group in groups)
        return InfeasibleError(
            f"no plan found in shares {format_shares(sizes) if sizes else 'of equal size'} fits in the memory of every"
            f" group ({limits}): the plans that fit in others exceed that of {self._name(self.exceeded)}; take a"
            " smaller batch, or leave that group out"
        )


def plain(mesh: Mesh) -> Mesh:
    """`mesh` with its shares as no rank in particular sees them."""
    return replace(mesh, shares=tuple((axis, tuple(rows)) for axis, rows in mesh.shares))
