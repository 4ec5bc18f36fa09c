"""The best lower bound that a price on memory proves, and the choices met on the way.

For a price p >= 0 in seconds a byte, min over choices of cost + p * (memory - limit) is at most the cost of any choice
within the limit (weak duality). As a function of p it is concave and piecewise linear, and elimination evaluates it
together with a choice, which is a line above it. Following the crossing of the best lines from both sides ends at the
maximum after finitely many steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from autopar.search.bounds.trws import Passed, pass_messages
from autopar.search.deadline import NEVER, Deadline
from autopar.search.min_plus.eliminate import Elimination, argmin, eliminate
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of

# Of price * limit, what rounding may have added to a bound: the sums have some hundred terms of 2^-53 relative error
# each.
ROUNDING = 1e-13

# Of the choices that messages meet at a price, these are worth a descent.
_MOST_MET = 2
# A few sweeps are enough: the next step begins where they end.
_MOST_SWEEPS = 12
# So many steps in a row that raise the bound by less than the tolerance are the last.
_MOST_STALE = 2

_Part = TypeVar("_Part", Node, Edge)


@dataclass(frozen=True, eq=False)
class Step:
    """What is known at one price: no choice has a lower objective than `value`; a few choices `met`, best first; what
    says so.
    """

    value: float
    met: tuple[tuple[int, ...], ...]
    source: Elimination | Passed


# The table, a price, and the step before at another price of the same table.
Evaluate = Callable[[CostTable, float, Step | None], Step]


@dataclass(frozen=True, eq=False)
class Dual:
    """The step at the best price, and all choices `met`, latest last.

    `around`: one above the limit and one within it that cost the same at about that price, where the limit binds. The
    objective of the step exceeds that of the bound by `rebate_s`: price * limit, less than that by what rounding may
    have added.
    """

    step: Step
    price: float
    rebate_s: float
    met: tuple[tuple[int, ...], ...]
    is_best: bool
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def bound_s(self) -> float:
        """No choice within the limit costs less; `inf` when everything is forbidden."""
        return self.step.value - self.rebate_s


def by_elimination(order: Sequence[int]) -> Evaluate:
    """Evaluate a price exactly."""

    def evaluate(table: CostTable, price: float, before: Step | None) -> Step:
        elimination = eliminate(table, order, multiplier=price)
        return Step(elimination.value, (argmin(elimination),), elimination)

    return evaluate


def by_messages(best: tuple[int, ...] | None, deadline: Deadline = NEVER) -> Evaluate:
    """Evaluate a price by passing messages; what costs more than `best`, a choice within the limit, does not matter."""

    def evaluate(table: CostTable, price: float, before: Step | None) -> Step:
        ceiling = float("inf")
        if best is not None:
            ceiling = cost_of(table, best) + (price * table.memory_limit_bytes if price else 0.0)
        passed = pass_messages(
            table,
            multiplier=price,
            known=() if best is None else (best,),
            ceiling=ceiling,
            most_sweeps=_MOST_SWEEPS,
            deadline=deadline,
            before=None if before is None else before.source,
        )
        return Step(passed.value, passed.met[:_MOST_MET], passed)

    return evaluate


def maximise(
    table: CostTable,
    evaluate: Evaluate,
    *,
    feasible: tuple[int, ...] | None,
    above: tuple[int, ...] | None = None,
    tolerance: float = 0.0,
    enough_s: float = float("inf"),
    most_steps: int = 40,
    deadline: Deadline = NEVER,
) -> Dual:
    """Maximise the bound over the price, the first step at price 0, or where `above` costs as much as `feasible`.

    `feasible`: a choice within the limit, without which there is no other price to try; `above`: one above it. Ends
    when the bound is within `tolerance`, relatively, of the best that any price gives, steps no longer raise it by as
    much, or it reaches `enough_s`. The bound is valid, if not the best, after any number of steps; no step but the
    first begins after `deadline`.
    """
    light = from_least_memory(table)
    lines = (
        {} if feasible is None else {choice: _line(light, choice) for choice in (feasible, above) if choice is not None}
    )
    top, best, latest, met, is_best, num_stale = _top(lines), None, None, (), False, 0
    for _ in range(most_steps):
        price = _next_price(top, best, tolerance)
        is_stuck = num_stale == _MOST_STALE if tolerance else latest is not None and price == latest.price
        if (
            is_best
            or is_stuck
            or (best is not None and best.bound_s >= enough_s)
            or (latest is not None and deadline.is_past)
        ):
            break
        latest = _at(light, price, evaluate, latest)
        met = (*met, *latest.step.met)
        raised_s = latest.bound_s - (-np.inf if best is None else best.bound_s)
        num_stale = 0 if raised_s > tolerance * abs(latest.bound_s) else num_stale + 1
        best = latest if raised_s > 0 else best
        is_best = feasible is None or not np.isfinite(latest.bound_s)
        if not is_best:
            lines |= {choice: _line(light, choice) for choice in latest.step.met}
            top = _top(lines)
            is_best = top.value_s - best.bound_s <= max(
                tolerance * abs(best.bound_s), 2e-12 * (abs(top.value_s) + latest.rebate_s)
            )
    return replace(best, met=met, is_best=is_best, around=top.around if best.price else None)


@dataclass(frozen=True, eq=False)
class _Top:
    """The price at which the least of some lines is highest, how high, and the two lines that cross there, if it is not
    0.

    Each choice is a line above the bound, so that no price gives a better bound than this.
    """

    price: float
    value_s: float
    around: tuple[tuple[int, ...], tuple[int, ...]] | None


def _line(table: CostTable, choice: tuple[int, ...]) -> tuple[float, float]:
    """Seconds, and bytes above the limit."""
    return cost_of(table, choice), memory_of(table, choice) - table.memory_limit_bytes


def _top(lines: Mapping[tuple[int, ...], tuple[float, float]]) -> _Top:
    lines = {choice: line for choice, line in lines.items() if line[0] < np.inf}
    over = min(lines, key=lines.__getitem__, default=None)
    within = min((choice for choice in lines if lines[choice][1] <= 0), key=lines.__getitem__, default=None)
    if over is None or within is None or over == within:
        return _Top(0.0, np.inf if within is None else lines[within][0], None)
    while True:
        (cost_a, excess_a), (cost_w, excess_w) = lines[over], lines[within]
        price = max(0.0, (cost_w - cost_a) / (excess_a - excess_w))
        value_s = min(cost_a + price * excess_a, cost_w + price * excess_w)
        least_s, lowest = min((cost_s + price * excess, choice) for choice, (cost_s, excess) in lines.items())
        if least_s >= value_s - 1e-12 * abs(value_s):
            return _Top(price, value_s, (over, within))
        over, within = (lowest, within) if lines[lowest][1] > 0 else (over, lowest)


def _next_price(top: _Top, best: Dual | None, tolerance: float) -> float:
    """Where the lines are highest; half way from the best so far if that is not known well, for such lines lead far
    away.
    """
    if tolerance and best is not None and best.price and top.price:
        return (best.price + top.price) / 2
    return top.price


def _at(table: CostTable, price: float, evaluate: Evaluate, before: Dual | None) -> Dual:
    step = evaluate(table, price, None if before is None else before.step)
    return Dual(step, price, price * table.memory_limit_bytes * (1 + ROUNDING) if price else 0.0, (), is_best=False)


def around_limit(
    table: CostTable, choices: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Of some choices the two, above and within the limit, that cost least at the price at which they cost the same.

    None if what is above the limit costs no less than what is within it.
    """
    return _top({choice: _line(table, choice) for choice in choices}).around


def least_memory(table: CostTable, order: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Bytes of the choice that takes least, and the choice; `inf` when everything is forbidden."""
    elimination = eliminate(memory_only(table), order)
    return elimination.value, argmin(elimination)


def memory_only(table: CostTable) -> CostTable:
    """The table with memory in place of cost, the same forbidden."""
    nodes = tuple(
        replace(node, cost_s=np.where(np.isinf(node.cost_s), np.inf, node.memory_bytes)) for node in table.nodes
    )
    edges = tuple(
        replace(edge, cost_s=np.where(np.isinf(edge.cost_s), np.inf, edge.memory_bytes)) for edge in table.edges
    )
    return replace(table, nodes=nodes, edges=edges)


def from_least_memory(table: CostTable) -> CostTable:
    """Memory counted from each node's and edge's least: price * limit would otherwise drown the costs it is compared
    with.
    """
    if np.isinf(table.memory_limit_bytes):
        return table
    nodes, edges = [_lightened(node) for node in table.nodes], [_lightened(edge) for edge in table.edges]
    limit = table.memory_limit_bytes - sum(least for _, least in (*nodes, *edges))
    return CostTable(tuple(node for node, _ in nodes), tuple(edge for edge, _ in edges), limit)


def _lightened(part: _Part) -> tuple[_Part, float]:
    allowed = np.isfinite(part.cost_s)
    least = float(part.memory_bytes[allowed].min(initial=np.inf))
    least = least if np.isfinite(least) else 0.0
    return replace(part, memory_bytes=np.where(allowed, part.memory_bytes - least, 0.0)), least
