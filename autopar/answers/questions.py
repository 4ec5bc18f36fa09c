"""Why a plan is as it is, and why it is not otherwise: the plan is made again with a choice forbidden or pinned."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.answers.compare_plans import Comparison, compare
from autopar.answers.comparison_text import format_details
from autopar.answers.plan_rows import plan_rows
from autopar.answers.step_terms import AnyPlan
from autopar.errors import AutoparError, InfeasibleError, PinError
from autopar.explain.common_text import unfit
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph, Op
from autopar.ir.op_facts import family
from autopar.mesh import Mesh
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.sbp.placement import format_layout
from autopar.units import format_bytes, format_seconds

# Memory beyond the limit whose worth `why_memory` tells.
MORE_BYTES = 2**30
_TIE = 1e-9

Planner = Callable[[PlanRequest, Mesh], AnyPlan]  # plans the same graph


@dataclass(frozen=True)
class Answer:
    """The answer to a question about `plan`.

    `question`: its text. `sentence`: what the answer says first. `other`: the plan with the choice forbidden or pinned,
    or None if there is none; `why_none`: the reason.
    """

    question: str
    sentence: str
    plan: AnyPlan
    other: AnyPlan | None = None
    why_none: str = ""

    @cached_property
    def comparison(self) -> Comparison | None:
        """The plan and the other one side by side."""
        return None if self.other is None else compare(self.plan, self.other, ("this plan", "the other"))

    def as_json(self) -> dict[str, Any]:
        """The answer as plain dicts, lists, strings and numbers."""
        compared = self.comparison and self.comparison.as_json()
        told = {"question": self.question, "sentence": self.sentence, "why_none": self.why_none}
        return told | {"comparison": compared}

    def __str__(self) -> str:
        told = self.why_none if self.comparison is None else format_details(self.comparison)
        return f"{self.question}\n{self.sentence}\n\n{told}"


@dataclass(frozen=True)
class Asked:
    """A plan that is asked about: its graph, the request that it was made for, and a planner for others."""

    plan: AnyPlan
    graph: Graph
    request: PlanRequest
    planner: Planner

    @cached_property
    def folded(self) -> Folded:
        """The classes of ops and tensors that are planned alike."""
        return fold(self.graph)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Input value -> its shape."""
        return {item.value.name: item.value.shape for item in self.graph.inputs}

    def again(self, **options: Any) -> AnyPlan:
        """The plan on the same mesh with other planning `options`; errors as in `choose_plan`."""
        return self.planner(replace(self.request, **options), self.plan.mesh)

    def copies(self, name: str) -> list[str]:
        """The op or value `name` and its copies."""
        first = self.folded.representative[name]
        return [each for each, same in self.folded.representative.items() if same == first]

    def parts(self) -> tuple[Plan, ...]:
        """The plans of the stages, or the only one."""
        return (self.plan,) if isinstance(self.plan, Plan) else self.plan.stages


def why(asked: Asked, name: str) -> Answer:
    """Why the op, tensor or module called `name` is laid out as it is: the best plan in which it is not.

    `name`: an op ("%linear_3"), the FQN of a parameter or buffer, or that of a module, whose most expensive op is then
    asked about; "NAME:all_gather", a collective on what such an op or tensor gives; or "memory", for what the memory
    limit costs. What is forbidden for one copy of a block is forbidden for all, as a plan decides it for all.
    AutoparError for another name, with the nearest ones.
    """
    if name == "memory":
        return _why_memory(asked)
    name, _, kind = name.partition(":")
    target = _resolved(asked, name)
    if kind:
        return _why_collective(asked, name, target, kind)
    chosen = _chosen(asked, target)
    if not chosen:
        raise AutoparError(f"--why {name}: %{target} is in no stage of the plan")
    laid_out = " or ".join(sorted({text for texts in chosen.values() for text in texts}))
    question = f"Why {name}{'' if name.lstrip('%') == target else f' (%{target})'}: {laid_out}?"
    try:
        other = asked.again(excluded={**asked.request.excluded, **chosen})
    except PinError as error:
        return Answer(question, "There is no other way on this mesh.", asked.plan, why_none=str(error))
    except InfeasibleError as error:
        return Answer(question, "Every other way needs more memory than there is.", asked.plan, why_none=str(error))
    return Answer(question, _of_forbidden(asked.plan, other), asked.plan, other)


def _why_collective(asked: Asked, name: str, target: str, kind: str) -> Answer:
    """The best plan without the collectives of this kind on the values of `target`.

    Without them either `target` is laid out otherwise, or all that reads the converted value is: the better of both.
    """
    owners = {value.name: op.name for part in asked.parts() for op in part.graph.ops for value in op.outputs}
    copies = set(asked.copies(target))
    here = [
        planned
        for part in asked.parts()
        for planned in part.costs.collectives
        if owners.get(planned.where, planned.where) in copies
    ]
    found = [planned for planned in here if planned.collective.kind == kind]
    if not found:
        kinds = ", ".join(sorted({planned.collective.kind for planned in here})) or "none"
        raise AutoparError(
            f"--why {name}:{kind}: the plan has no {kind} on the values of %{target}; its collectives there: {kinds}"
        )
    readers = {asked.folded.representative[user] for each in found for user in each.users} - copies
    ways = [_chosen(asked, target), {k: v for user in readers for k, v in _chosen(asked, user).items()}]
    others, reasons = list[AnyPlan](), list[str]()
    for chosen in filter(None, ways):
        try:
            others.append(asked.again(excluded={**asked.request.excluded, **chosen}))
        except (InfeasibleError, PinError) as error:
            reasons.append(str(error))
    question = f"Why {kind} on {name} (%{target}), {sum(each.time_s for each in found) * 1e3:.3g} ms of them?"
    if not others:
        return Answer(question, "No plan does without it.", asked.plan, why_none="; ".join(reasons))
    other = min(others, key=lambda plan: plan.step_s)
    return Answer(question, _of_forbidden(asked.plan, other), asked.plan, other)


def _of_forbidden(plan: AnyPlan, other: AnyPlan) -> str:
    change_s = other.step_s - plan.step_s
    if abs(change_s) <= _TIE * plan.step_s:
        return "It could as well be otherwise: no difference, a tie."
    if change_s < 0:
        return (
            f"A plan without it is {format_seconds(-change_s)} faster, which the search had not met: it proves a gap of"
            f" {plan.gap:.1%} only. Allow more time (--time-limit)."
        )
    bound = f"; none takes less than {format_seconds(other.lower_bound_s)}" if other.lower_bound_s > plan.step_s else ""
    return f"The best plan found without it takes {format_seconds(change_s)} more a step{bound}."


def why_not_pinned(asked: Asked, fqn: str, layout: str) -> Answer:
    """Why the parameter or buffer `fqn` is not stored in `layout`: the best plan in which it is."""
    question = f"Why not {fqn}={layout}?"
    try:
        other = asked.again(pins={**asked.request.pins, fqn: layout})
    except InfeasibleError as error:
        return Answer(question, "No plan that has it fits.", asked.plan, why_none=str(error))
    return Answer(question, _of_pinned(asked.plan, other), asked.plan, other)


def why_not_by_hand(asked: Asked, name: str, other: Plan) -> Answer:
    """Why the hand plan `name`, which is `other`, was not chosen."""
    question = f"Why not {name}?"
    limit, needed = other.memory_limit_bytes, other.costs.total_memory_bytes
    if needed > limit:
        sentence = (
            f"It needs {format_bytes(needed)} on a device by the estimate{unfit(needed, limit)}, {format_bytes(limit)};"
            f" with {format_bytes(needed - limit)} more it would fit, and take {format_seconds(other.step_s)} a step."
        )
        return Answer(question, sentence, asked.plan, other)
    return Answer(question, _of_pinned(asked.plan, other), asked.plan, other)


def _of_pinned(plan: AnyPlan, other: AnyPlan) -> str:
    change_s = other.step_s - plan.step_s
    if abs(change_s) <= _TIE * plan.step_s:
        return "No difference: a tie."
    if change_s < 0 and other.mesh != plan.mesh:
        return (
            f"On mesh {other.mesh}, which was not asked for, it is {format_seconds(-change_s)} faster: leave it open."
        )
    if change_s < 0:
        return f"It is {format_seconds(-change_s)} faster, which the search had not met (gap {plan.gap:.1%})."
    return f"The best plan found with it takes {format_seconds(change_s)} more a step."


def _why_memory(asked: Asked) -> Answer:
    """The cost of the memory limit: the best plan with a GiB more."""
    limit = asked.plan.memory_limit_bytes
    question = f"What does the memory limit of {format_bytes(limit)} cost?"
    other = asked.again(memory_limit_bytes=limit + MORE_BYTES)
    saved_s = asked.plan.step_s - other.step_s
    sentence = (
        f"A GiB more a device saves {format_seconds(saved_s)} a step."
        if saved_s > _TIE * asked.plan.step_s
        else "A GiB more a device saves nothing: the limit does not bind."
    )
    return Answer(question, sentence, asked.plan, other)


def _chosen(asked: Asked, target: str) -> Mapping[str, tuple[str, ...]]:
    """The op or value and its copies -> the texts of what the plan has chosen for any of them."""
    copies = set(asked.copies(target))
    texts: dict[str, None] = {}
    for part in asked.parts():
        chosen = part.assignment
        texts |= {str(strategy): None for name, strategy in chosen.strategies.items() if name in copies}
        texts |= {format_layout(layout): None for name, layout in chosen.layouts.items() if name in copies}
    return dict.fromkeys(sorted(copies), tuple(texts)) if texts else {}


def _resolved(asked: Asked, name: str) -> str:
    """The op or input value that `name` means; AutoparError with the nearest names if there is none."""
    ops = {op.name: op for op in asked.graph.ops}
    tensors = {fqn: item.value.name for item in asked.graph.inputs for fqn in (item.fqn, *item.aliases)}
    if name.removeprefix("%") in ops:
        return name.removeprefix("%")
    if name in tensors:
        return tensors[name]
    inside = [op for op in asked.graph.ops if op.module == name or op.module.startswith(f"{name}.")]
    if inside:
        return _most_expensive(asked, inside).name
    modules = {op.module for op in asked.graph.ops}
    near = difflib.get_close_matches(name, [*tensors, *modules, *(f"%{op}" for op in ops)], n=3)
    close = f"; close to it: {', '.join(near)}" if near else f"; there is e.g. {next(iter(tensors), 'no tensor')}"
    raise AutoparError(f"the plan has no op, tensor or module {name!r}{close}")


def _most_expensive(asked: Asked, ops: list[Op]) -> Op:
    rows, seconds, numbers = plan_rows(asked.plan), {}, dict[tuple[str, str], int]()
    for op in asked.graph.ops:
        key = op.module, family(op.target)
        numbers[key] = numbers.get(key, -1) + 1
        row = rows.get((*key, numbers[key]))
        seconds[op.name] = row.time_s if row else 0.0
    return max(ops, key=lambda op: seconds[op.name])
