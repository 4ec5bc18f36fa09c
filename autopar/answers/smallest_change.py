"""The smallest change of one quantity with which a plan fits, found by plans on both sides of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.answers.step_terms import AnyPlan
from autopar.errors import AutoparError, InfeasibleError
from autopar.explain.common_text import table
from autopar.units import format_bytes, format_seconds

# A change is narrowed down until what fits and what does not are this close.
ENOUGH = 1.1

Attempt = Callable[[float], AnyPlan]  # the plan with a value of the quantity; InfeasibleError if none fits


@dataclass(frozen=True, slots=True)
class SmallestChange:
    """A change of `what` from `before` to `after` that makes a plan fit, and that plan.

    `refused`: the value nearest to it that was seen not to fit, and `reason` the error then. `plan` is None if no value
    of those that were tried makes one fit.
    """

    what: str
    before: str
    after: str
    plan: AnyPlan | None
    refused: str
    reason: str


def by_bisection(
    what: str, attempt: Attempt, start: float, far: Iterable[float], text: Callable[[float], str], *, unit: int = 0
) -> SmallestChange:
    """The change of a quantity from `start`, which does not fit, towards the values `far`, ever further from it.

    The first of `far` that fits is narrowed down between it and the value before, until they differ by `ENOUGH` times,
    or by one `unit` where only its multiples are values.
    """
    refused, reason, fits = start, "", None
    for value in far:
        try:
            plan = attempt(value)
        except InfeasibleError as error:
            refused, reason = value, str(error)
            continue
        fits = value, plan
        break
    if fits is None:
        return SmallestChange(what, text(start), "", None, text(refused), reason)
    while max(fits[0], refused) > ENOUGH * min(fits[0], refused) and abs(fits[0] - refused) > unit:
        middle = (fits[0] * refused) ** 0.5
        middle = unit * round(middle / unit) if unit else middle
        if middle in (fits[0], refused):
            break
        try:
            fits = middle, attempt(middle)
        except InfeasibleError as error:
            refused, reason = middle, str(error)
    return SmallestChange(what, text(start), text(fits[0]), fits[1], text(refused), reason)


def by_trial(what: str, before: str, attempts: Sequence[tuple[str, Callable[[], AnyPlan]]]) -> SmallestChange:
    """The first of several named changes, smallest first, with which a plan fits."""
    refused, reason = before, ""
    for name, attempt in attempts:
        try:
            return SmallestChange(what, before, name, attempt(), refused, reason)
        except InfeasibleError as error:
            refused, reason = name, str(error)
        except AutoparError as error:  # it cannot be changed so
            reason = str(error)
    return SmallestChange(what, before, "", None, refused, reason)


def format_changes(changes: Sequence[SmallestChange]) -> str:
    """A table of changes: each alone makes a plan fit."""
    lines = []
    for each in changes:
        if each.plan is None:
            lines.append([each.what, each.before, "none tried fits", "", "", f"{each.refused} does not"])
            continue
        memory = format_bytes(max(each.plan.peak_bytes or each.plan.memory_bytes))
        step = format_seconds(each.plan.step_s)
        lines.append([each.what, each.before, each.after, step, memory, f"{each.refused} does not"])
    headers = ["change one of", "from", "to", "step", "memory", "nearest that fails"]
    return table(lines, headers)
