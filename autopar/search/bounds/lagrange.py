"""The Lagrangian lower bound: the best bound that a price on memory proves, and the choices met on the way.

For a price p >= 0 in seconds a byte, min over choices of cost + p * (memory - limit) is at most the cost of any choice
within the limit (weak duality). As a function of p it is concave and piecewise linear. Elimination evaluates it
together with a minimising choice, which is a line above it. The next price is where the best lines from both sides
cross; this reaches the maximum after finitely many steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from autopar.search.bounds.trws import Passed, pass_messages
from autopar.search.deadline import NEVER, Deadline
from autopar.search.min_plus.eliminate import Elimination, argmin, eliminate
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of

# The share of price * limit that rounding may have added to a bound: sums of some hundred terms, each with a relative
# error of 2^-53.
ROUNDING = 1e-13

# The number of choices that a message pass visits at a price from which a descent starts.
_MOST_MET = 2
# The most sweeps of a message pass: few suffice, since the next step begins where they end.
_MOST_SWEEPS = 12
# The maximisation stops after this number of steps in a row that raise the bound by less than the tolerance.
_MOST_STALE = 2

_Part = TypeVar("_Part", Node, Edge)


@dataclass(frozen=True, eq=False)
class PricedBound:
    """The result at one price: no choice has a lower objective than `value`, as `source` proves.

    `met`: a few choices visited, best first. `source`: None if only the value is known.
    """

    value: float
    met: tuple[tuple[int, ...], ...]
    source: Elimination | Passed | None


# (table, price, the previous step at another price of the same table) -> step
Evaluate = Callable[[CostTable, float, PricedBound | None], PricedBound]


@dataclass(frozen=True, eq=False)
class Dual:
    """The step at the best price, and all choices `met`, latest last.

    `around`: if the limit binds, a choice above it and one within it that have equal objectives at about that price.
    `rebate_s` is subtracted from the step's objective to give the bound: price * limit plus an allowance for rounding.
    """

    step: PricedBound
    price: float
    rebate_s: float
    met: tuple[tuple[int, ...], ...]
    is_best: bool
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def bound_s(self) -> float:
        """The lower bound on the cost of choices within the limit; `inf` if every choice is forbidden."""
        return self.step.value - self.rebate_s


def by_elimination(order: Sequence[int]) -> Evaluate:
    """An exact evaluation of prices, by elimination in `order`."""

    def evaluate(table: CostTable, price: float, before: PricedBound | None) -> PricedBound:
        elimination = eliminate(table, order, multiplier=price)
        return PricedBound(elimination.value, (argmin(elimination),), elimination)

    return evaluate


def by_messages(best: tuple[int, ...] | None, deadline: Deadline = NEVER) -> Evaluate:
    """An evaluation of prices by message passing.

    Costs above that of `best`, a choice within the limit, do not matter.
    """

    def evaluate(table: CostTable, price: float, before: PricedBound | None) -> PricedBound:
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
            before=before.source if before is not None and isinstance(before.source, Passed) else None,
        )
        return PricedBound(passed.value, passed.met[:_MOST_MET], passed)

    return evaluate


@dataclass(frozen=True)
class Enough:
    """When a maximisation ends: the bound is `cost_s`, or within the relative `precision` of the maximum, or within the
    `tolerance` where steps are not exact and no longer raise it by as much; at the latest after `most_steps`.
    """

    tolerance: float = 0.0
    precision: float = 0.0
    cost_s: float = float("inf")
    most_steps: int = 40


_BEST = Enough()


def maximise(
    table: CostTable,
    evaluate: Evaluate,
    *,
    feasible: tuple[int, ...] | None,
    above: tuple[int, ...] | None = None,
    enough: Enough = _BEST,
    deadline: Deadline = NEVER,
) -> Dual:
    """The maximum of the bound over prices, from price 0 or from the price at which `above` and `feasible` cost the
    same.

    `feasible`: a choice within the limit, without which only one price is tried; `above`: a choice above it. The bound
    is valid, if not the best, after any number of steps; no step but the first begins after `deadline`.
    """
    light = from_least_memory(table)
    lines = (
        {} if feasible is None else {choice: _line(light, choice) for choice in (feasible, above) if choice is not None}
    )
    top, best, latest, met, is_best, num_stale = _top(lines), None, None, (), False, 0
    tolerance = enough.tolerance
    for _ in range(enough.most_steps):
        price = _next_price(top, best, tolerance)
        is_stuck = num_stale == _MOST_STALE if tolerance else latest is not None and price == latest.price
        if (
            is_best
            or is_stuck
            or (best is not None and best.bound_s >= enough.cost_s)
            or (latest is not None and deadline.is_past)
        ):
            break
        latest = _at(light, price, evaluate, latest)
        met = (*met, *latest.step.met)
        raised_s = latest.bound_s - (-np.inf if best is None else best.bound_s)
        num_stale = 0 if raised_s > tolerance * abs(latest.bound_s) else num_stale + 1
        best = latest if best is None or raised_s > 0 else best
        is_best = feasible is None or not np.isfinite(latest.bound_s)
        if not is_best:
            lines |= {choice: _line(light, choice) for choice in latest.step.met}
            top = _top(lines)
            is_best = top.value_s - best.bound_s <= max(
                max(tolerance, enough.precision) * abs(best.bound_s), 2e-12 * (abs(top.value_s) + latest.rebate_s)
            )
    assert best is not None, "at least one price is tried"
    return replace(best, met=met, is_best=is_best, around=top.around if best.price else None)


@dataclass(frozen=True, eq=False)
class _Top:
    """The maximum of the lower envelope of some lines: its price, its value, and the two lines that cross there.

    At price 0 `around` is None. Each choice is a line above the bound, so that no price gives a better bound than this.
    """

    price: float
    value_s: float
    around: tuple[tuple[int, ...], tuple[int, ...]] | None


def _line(table: CostTable, choice: tuple[int, ...]) -> tuple[float, float]:
    """The line of a choice: (seconds at price 0, slope: bytes above the limit)."""
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
    """The price of the envelope's maximum; if steps are inexact, half way to it, since such lines lead far away."""
    if tolerance and best is not None and best.price and top.price:
        return (best.price + top.price) / 2
    return top.price


def _at(table: CostTable, price: float, evaluate: Evaluate, before: Dual | None) -> Dual:
    step = evaluate(table, price, None if before is None else before.step)
    return Dual(step, price, price * table.memory_limit_bytes * (1 + ROUNDING) if price else 0.0, (), is_best=False)


def around_limit(
    table: CostTable, choices: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The pair of `choices` above and within the limit with the least objective at the price where both are equal.

    None if no choice above the limit costs less than those within it.
    """
    return _top({choice: _line(table, choice) for choice in choices}).around


def least_memory(table: CostTable, order: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """(bytes, choice) of the choice of least memory; `inf` bytes if every choice is forbidden."""
    elimination = eliminate(memory_only(table), order)
    return elimination.value, argmin(elimination)


def memory_only(table: CostTable) -> CostTable:
    """The table with memory in place of cost, and with the same forbidden entries."""
    nodes = tuple(
        replace(node, cost_s=np.where(np.isinf(node.cost_s), np.inf, node.memory_bytes)) for node in table.nodes
    )
    edges = tuple(
        replace(edge, cost_s=np.where(np.isinf(edge.cost_s), np.inf, edge.memory_bytes)) for edge in table.edges
    )
    return replace(table, nodes=nodes, edges=edges)


def from_least_memory(table: CostTable) -> CostTable:
    """The table with the memory of each node and edge counted from its least, for precision.

    Otherwise price * limit would be much larger than the costs that it is added to.
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
