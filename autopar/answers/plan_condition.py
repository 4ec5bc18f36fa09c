"""`parse_condition`: a condition on a plan's figures, such as "step_ms > 420 or gap > 2%", by which a CI job fails."""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.answers.step_terms import AnyPlan
from autopar.errors import AutoparError
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan

_GIB = 2**30
# Name -> its figure of a plan. Memory is that of the fullest device: the predicted peak, or without one the estimate.
FIGURES: Mapping[str, Callable[[AnyPlan], float]] = {
    "step_ms": lambda plan: plan.step_s * 1e3,
    "bound_ms": lambda plan: plan.lower_bound_s * 1e3,
    "gap": lambda plan: plan.gap,
    "memory_gib": lambda plan: _memory(plan) / _GIB,
    "memory_share": lambda plan: operator.truediv(*plan.fullest_bytes),
    "parameters_on_host": lambda plan: float(_on_host(plan)),
}
_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?\s*%?)|(?P<word>[A-Za-z_]+)|(?P<sign>[<>=!]=?|[()]))"
)
_MOST_NESTED = 50


@dataclass(frozen=True, slots=True)
class Relation:
    """A comparison of two figures or numbers: `sides` as written."""

    sides: tuple[str, str]
    order: str

    def holds(self, figures: Mapping[str, float]) -> bool:
        """Whether it is true of the figures."""
        left, right = (figures[side] if side in figures else _number(side) for side in self.sides)
        return _ORDERS[self.order](left, right)


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparisons of which all (`is_all`) or any must hold, and conditions likewise."""

    parts: tuple["Relation | Condition", ...]
    is_all: bool

    def holds(self, figures: Mapping[str, float]) -> bool:
        """Whether it is true of the figures."""
        return (all if self.is_all else any)(part.holds(figures) for part in self.parts)

    def comparisons(self) -> Iterator[Relation]:
        """All comparisons, from left to right."""
        for part in self.parts:
            yield from part.comparisons() if isinstance(part, Condition) else (part,)


def parse_condition(text: str) -> Condition:
    """The condition that `text` writes: comparisons (< <= > >= == !=) of `FIGURES` and numbers, of which "2%" is 0.02,
    joined by `and`, `or` and parentheses; `and` binds more tightly. AutoparError with the place of what is none.

    >>> parse_condition("step_ms > 420 or gap > 2%").holds({"step_ms": 400.0, "gap": 0.03})
    True
    """
    tokens = list(_tokens(text))
    condition = _alternatives(text, tokens, 0)
    if tokens[0][0]:
        raise _unreadable(text, tokens[0][1], "and, or, or the end")
    return condition


def why_failed(condition: Condition, plan: AnyPlan) -> str:
    """The comparisons that hold for the plan, with its figures, if the condition does; else ""."""
    figures = {name: figure(plan) for name, figure in FIGURES.items()}
    if not condition.holds(figures):
        return ""
    held = (comparison for comparison in condition.comparisons() if comparison.holds(figures))
    return " and ".join(
        f"{left} {comparison.order} {right}"
        for comparison in dict.fromkeys(held)
        for left, right in [(_told(side, figures) for side in comparison.sides)]
    )


def _memory(plan: AnyPlan) -> float:
    return max(plan.peak_bytes or plan.memory_bytes)


def _on_host(plan: AnyPlan) -> int:
    stages: tuple[Plan, ...] = plan.stages if isinstance(plan, StagedPlan) else (plan,)
    return sum(len(stage.assignment.state_on_host) for stage in stages)


def _told(side: str, figures: Mapping[str, float]) -> str:
    if side not in figures:
        return side
    return f"{side} {figures[side]:.2%}" if side in ("gap", "memory_share") else f"{side} {figures[side]:.4g}"


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """(token, place) of each token, and at the end ("", place)."""
    place = 0
    while place < len(text.rstrip()):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _unreadable(text, place, "a figure, a number or a comparison")
        yield match[match.lastgroup or 0].strip(), match.start(match.lastgroup or 0)
        place = match.end()
    yield "", len(text)


def _alternatives(text: str, tokens: list[tuple[str, int]], depth: int) -> Condition:
    parts = [_all_of(text, tokens, depth)]
    while tokens[0][0] == "or":
        tokens.pop(0)
        parts.append(_all_of(text, tokens, depth))
    return Condition(tuple(parts), is_all=False)


def _all_of(text: str, tokens: list[tuple[str, int]], depth: int) -> Condition:
    parts = [_one(text, tokens, depth)]
    while tokens[0][0] == "and":
        tokens.pop(0)
        parts.append(_one(text, tokens, depth))
    return Condition(tuple(parts), is_all=True)


def _one(text: str, tokens: list[tuple[str, int]], depth: int) -> Relation | Condition:
    if tokens[0][0] == "(":
        _, place = tokens.pop(0)
        if depth == _MOST_NESTED:
            raise _unreadable(text, place, f"at most {_MOST_NESTED} parentheses in one another")
        inside = _alternatives(text, tokens, depth + 1)
        if tokens[0][0] != ")":
            raise _unreadable(text, tokens[0][1], "')'")
        tokens.pop(0)
        return inside
    left = _side(text, tokens)
    order, place = tokens[0]
    if order not in _ORDERS:
        raise _unreadable(text, place, f"one of {' '.join(_ORDERS)}")
    tokens.pop(0)
    return Relation((left, _side(text, tokens)), order)


def _side(text: str, tokens: list[tuple[str, int]]) -> str:
    side, place = tokens[0]
    if side not in FIGURES and not side[:1].isdigit():
        raise _unreadable(text, place, f"a number or one of {', '.join(FIGURES)}")
    tokens.pop(0)
    if side[0].isdigit() and not math.isfinite(_number(side)):
        raise _unreadable(text, place, "a finite number")
    return side


def _number(text: str) -> float:
    return float(text.rstrip("%")) / (100 if text.endswith("%") else 1)


def _unreadable(text: str, place: int, expected: str) -> AutoparError:
    found = repr(text[place : place + 20]) if text[place:].strip() else "its end"
    return AutoparError(
        f"cannot read condition {text[:200]!r} at character {place + 1}: expected {expected}, found {found}; write e.g."
        " 'step_ms > 420 or gap > 2%'"
    )
