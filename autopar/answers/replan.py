"""`replanned`: a plan made anew for other devices, with what moving the state to it costs and when that is paid."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.answers.compare_plans import Comparison, compare
from autopar.answers.moved_state import MovedState, moved_state
from autopar.answers.step_terms import AnyPlan
from autopar.errors import AutoparError, InfeasibleError
from autopar.mesh import Devices, Mesh, stages_first
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.sbp.placement import format_layout

Planner = Callable[[Mesh | Devices, PlanRequest], AnyPlan]  # for one graph and cluster
MOST_TRIED = 4  # numbers of devices, of those between too few and those that there were


@dataclass(frozen=True)
class Weighed:
    """The plan made anew beside the one that keeps the layouts. `gain_s`: seconds of a step that it takes less;
    `more_s`: seconds that moving to it takes more.
    """

    gain_s: float
    more_s: float

    @property
    def paid_after_steps(self) -> float:
        """The number of steps from which on the plan made anew takes less time, the move included; `inf` if none."""
        if self.gain_s > 0:
            return max(0.0, self.more_s / self.gain_s)
        return 0.0 if self.gain_s == 0 and self.more_s <= 0 else math.inf

    def is_worth(self, num_steps: float) -> bool:
        """Whether moving to the plan made anew and so many steps of it take no more time."""
        return self.more_s <= num_steps * self.gain_s


@dataclass(frozen=True)
class Successor:
    """A plan for the devices that there are, and the state that moves to it. `read_s`: seconds of reading what only a
    checkpoint has, where the rate of that is known.
    """

    plan: AnyPlan
    state: MovedState
    read_s: float = 0.0

    @property
    def move_s(self) -> float:
        """Seconds until all state is where the plan has it."""
        return self.state.seconds + self.read_s


@dataclass(frozen=True)
class Replanned:
    """The plan `before`, and its successors on other devices.

    `after`: the plan that was made for them. `closest`: one that keeps the stored layouts of `before` on its axes, one
    of them shorter or longer; None if there is none, and `why_none` says why. `details`: the decisions in which
    `before` and `after` differ.
    """

    before: AnyPlan
    after: Successor
    closest: Successor | None
    why_none: str
    details: Comparison

    @property
    def weighed(self) -> Weighed:
        """The plan made anew beside the closest one; all zero without one."""
        if self.closest is None:
            return Weighed(0.0, 0.0)
        return Weighed(self.closest.plan.step_s - self.after.plan.step_s, self.after.move_s - self.closest.move_s)

    def chosen(self, num_steps: float) -> Successor:
        """The plan with which the move and so many steps take less time."""
        return self.after if self.closest is None or self.weighed.is_worth(num_steps) else self.closest


Closest = tuple[AnyPlan | None, str]


def request_like(plan: AnyPlan) -> PlanRequest:
    """The planning options with which `plan` was made, as far as a plan for other devices shares them."""
    training = replace(plan.training, num_microbatches=1, num_in_flight=1, num_waiting=0, in_stages=False)
    return PlanRequest(memory_limit_bytes=plan.memory_limit_bytes, training=training)


def replanned(
    before: AnyPlan,
    mesh: Mesh | Devices,
    planner: Planner,
    request: PlanRequest,
    lost: Collection[int] = (),
    read_rate: float | None = None,
    closest_to: Callable[[], Closest | None] = lambda: None,
) -> Replanned:
    """`before` beside a plan for `mesh`, made by `planner`, and the closest to it there.

    lost: ranks that are gone. read_rate: bytes of a checkpoint that all devices together read in a second; None: it is
    not known, and no time. closest_to: asked for what `closest_plan` found elsewhere; None: it is found here.
    InfeasibleError with the fewest devices that were found to hold the model if these do not; AutoparError for a rank
    that there is not.
    """
    try:
        after = planner(stages_first(mesh), request)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}; {_what_fits(before, stages_first(mesh), planner, request)}") from error
    closest, why_none = closest_to() or closest_plan(before, mesh, planner, request)
    kept = _successor(before, closest, lost, read_rate) if closest else None
    names = (f"before, {before.mesh}", f"after, {after.mesh}")
    made = _successor(before, after, lost, read_rate)
    return Replanned(before, made, kept, why_none, compare(before, after, names))


def _successor(before: AnyPlan, plan: AnyPlan, lost: Collection[int], read_rate: float | None) -> Successor:
    state = moved_state(before, plan, lost)
    return Successor(plan, state, state.total.read / read_rate if read_rate else 0.0)


def closest_plan(before: AnyPlan, mesh: Mesh | Devices, planner: Planner, request: PlanRequest) -> Closest:
    """(the plan on the axes of `before`, one of another size, with the layouts stored as there; why there is none)."""
    reasons = []
    kept = _kept_request(before, request)
    for there in _similar_meshes(before.mesh, stages_first(mesh)):
        try:
            return planner(there, kept), ""
        except (AutoparError, ValueError) as error:
            reasons.append(f"on {there} {str(error).partition(':')[0].partition(';')[0]}")
    return None, "; ".join(reasons) or f"no mesh of {mesh.num_devices} devices has the axes of {before.mesh}"


def _kept_request(before: AnyPlan, request: PlanRequest) -> PlanRequest:
    """`request` with the layouts in which `before` stores what is large enough to be split, and its schedule."""
    stages = (before,) if isinstance(before, Plan) else before.stages
    stored = {
        item.fqn: format_layout(stage.assignment.layouts[item.value.name])
        for stage in stages
        for item in stage.graph.of_kind("parameter")
    }
    changed: dict[str, Any] = {"stored": stored}
    if not isinstance(before, Plan):
        changed |= {"num_microbatches": before.schedule.num_microbatches, "schedule": before.schedule.name}
    return replace(request, **changed)


def _similar_meshes(before: Mesh, wanted: Mesh | Devices) -> Iterator[Mesh]:
    """Meshes with the axes of `before`, of which one has another size; the least change first."""
    if isinstance(wanted, Mesh):
        if wanted.axis_names == before.axis_names:
            yield wanted
        return
    sizes = []
    for axis, size in enumerate(before.shape):
        others = before.num_devices // size
        if wanted.num_devices % others == 0:
            sizes.append((abs(wanted.num_devices // others - size) / size, axis, wanted.num_devices // others))
    for _, axis, size in sorted(sizes):
        yield Mesh((*before.shape[:axis], size, *before.shape[axis + 1 :]), before.axis_names)


def _what_fits(before: AnyPlan, mesh: Mesh | Devices, planner: Planner, request: PlanRequest) -> str:
    """The fewest devices that were found to hold the model, between too few and those that there were."""
    tried = []
    for larger in _larger_meshes(before, mesh):
        try:
            plan = planner(larger, request)
        except (AutoparError, ValueError):
            tried.append(str(larger))
            continue
        return f"{larger} holds it, in {plan.mesh}" + (f" ({', '.join(tried)} does not)" if tried else "")
    return f"none of {', '.join(tried)} holds it either" if tried else f"the plan before is for {before.mesh}"


def _larger_meshes(before: AnyPlan, mesh: Mesh | Devices) -> Iterator[Mesh | Devices]:
    """Some meshes of more devices than `mesh`, the last with as many as `before` has or more."""
    count, node = before.mesh.num_devices, before.cluster.levels[0].size or 1
    if isinstance(mesh, Devices):
        unit = node if mesh.num_devices % node == 0 else 1
        sizes = range(mesh.num_devices + unit, count + 1, unit)
        step = -(-len(sizes) // MOST_TRIED) if sizes else 1
        yield from (Devices(size) for size in [*sizes[:-1:step], *sizes[-1:]])
        return
    others = mesh.num_devices // mesh.shape[0]
    for size in range(mesh.shape[0] + 1, min(mesh.shape[0] + MOST_TRIED, -(-count // others)) + 1):
        yield Mesh((size, *mesh.shape[1:]), mesh.axis_names)
