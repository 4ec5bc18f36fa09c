"""The best lower bound that a price on memory proves, and the choices met on the way.

For a price p >= 0 in seconds a byte, min over choices of cost + p * (memory - limit) is at most the cost of any choice within the limit
(weak duality). As a function of p it is concave and piecewise linear, and elimination evaluates it together with a choice, which is a line
above it. Following the crossing of the best lines from both sides ends at the maximum after finitely many steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import monotonic
from typing import TypeVar

import numpy as np

from autopar.search.eliminate import Elimination, argmin, eliminate
from autopar.search.messages import Passed, pass_messages
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of

# Of price * limit, what rounding may have added to a bound: the sums have some hundred terms of 2^-53 relative error each.
ROUNDING = 1e-13

# Of the choices that messages meet at a price, these are worth a descent.
_MOST_MET = 2
# A few sweeps are enough at one price of several, each of which begins where the one before has ended; and on a table with so few pairs of
# strategies that it is soon small enough to be eliminated.
_SMALL_PAIRS = 1e7
_FEW_SWEEPS, _MANY_SWEEPS = 12, 60
# Another step at the same price must close this part of what is left.
_LEAST_PROGRESS = 0.05

_Part = TypeVar("_Part", Node, Edge)


@dataclass(frozen=True, eq=False)
class Step:
    """What is known at one price: no choice has a lower objective than `value`; a few choices `met`, best first; what says so."""

    value: float
    met: tuple[tuple[int, ...], ...]
    source: Elimination | Passed


# The table, a price, and the step before at another price of the same table.
Evaluate = Callable[[CostTable, float, Step | None], Step]


@dataclass(frozen=True, eq=False)
class Dual:
    """The step at the best price, and all choices `met`, latest last.

    `around`: one above the limit and one within it that cost the same at about that price, where the limit binds. The objective of the
    step exceeds that of the bound by `rebate_s`: price * limit, less than that by what rounding may have added.
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


def _is_small(table: CostTable) -> bool:
    return sum(edge.cost_s.size for edge in table.edges) < _SMALL_PAIRS


def by_messages(best: tuple[int, ...] | None, deadline: float = float("inf")) -> Evaluate:
    """Evaluate a price by passing messages; what costs more than `best`, a choice within the limit, does not matter."""

    def evaluate(table: CostTable, price: float, before: Step | None) -> Step:
        ceiling = float("inf")
        if best is not None:
            ceiling = cost_of(table, best) + (price * table.memory_limit_bytes if price else 0.0)
        known, most_sweeps = () if best is None else (best,), _FEW_SWEEPS if price or _is_small(table) else _MANY_SWEEPS
        passed = pass_messages(
            table, multiplier=price, known=known, ceiling=ceiling, most_sweeps=most_sweeps, deadline=deadline,
            before=None if before is None else before.source,
        )  # fmt: skip
        return Step(passed.value, passed.met[:_MOST_MET], passed)

    return evaluate


def maximise(
    table: CostTable,
    evaluate: Evaluate,
    *,
    feasible: tuple[int, ...] | None,
    above: tuple[int, ...] | None = None,
    tolerance: float = 0.0,
    most_steps: int = 40,
    deadline: float = float("inf"),
) -> Dual:
    """Maximise the bound over the price, the first step at price 0, or where `above` costs as much as `feasible`.

    `feasible`: a choice within the limit, without which there is no other price to try; `above`: one above it. Ends when the bound is
    within `tolerance`, relatively, of the best that any price gives, or steps at one price no longer raise it. The bound is valid, if not
    the best, after any number of steps; no step but the first begins after `deadline` (of `time.monotonic`).
    """
    light = from_least_memory(table)
    within, above = feasible, None if feasible is None else above
    best, latest, met, is_best, is_free_known = None, None, (), False, False
    for _ in range(most_steps):
        price = 0.0 if above is None else max(0.0, _crossing(light, above, within))
        is_best = is_free_known and price == 0.0
        if is_best or (latest is not None and monotonic() > deadline):
            break
        before, latest = latest, _at(light, price, evaluate, latest)
        best = latest if best is None or latest.bound_s > best.bound_s else best
        met, found = (*met, *latest.step.met), latest.step.met[0]
        is_above = memory_of(light, found) > light.memory_limit_bytes
        if price == 0.0:
            is_free_known, is_best = True, feasible is None or not is_above or not np.isfinite(cost_of(light, found))
            if is_best:
                break
            above = found
            continue
        line_s = _objective(light, within, price)
        # No price gives a better bound than the one at which the lines of these two cross.
        left_s = line_s - latest.rebate_s - best.bound_s
        is_best = left_s <= max(tolerance * abs(best.bound_s), 2e-12 * abs(line_s))
        is_new = _objective(light, found, price) < line_s * (1 - 1e-12)
        if is_best or (not is_new and before and before.price == price and latest.bound_s - before.bound_s < _LEAST_PROGRESS * left_s):
            break
        if is_new:
            above, within = (found, within) if is_above else (above, found)
    around = None if above is None or best.price == 0.0 else (above, within)
    return replace(best, met=met, is_best=is_best, around=around)


def _at(table: CostTable, price: float, evaluate: Evaluate, before: Dual | None) -> Dual:
    step = evaluate(table, price, None if before is None else before.step)
    return Dual(step, price, price * table.memory_limit_bytes * (1 + ROUNDING) if price else 0.0, (), is_best=False)


def _objective(table: CostTable, choice: tuple[int, ...], price: float) -> float:
    return cost_of(table, choice) + price * memory_of(table, choice)


def around_limit(table: CostTable, choices: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Of some choices the two, above and within the limit, that cost least at the price at which they cost the same.

    None if what is above the limit costs no less than what is within it.
    """
    limit = table.memory_limit_bytes
    known = [(cost_of(table, choice), memory_of(table, choice) - limit, choice) for choice in choices]
    best_s, around = -np.inf, None
    for (cost_a, excess_a, above), (cost_w, excess_w, within) in product(known, known):
        if not (excess_a > 0 >= excess_w and cost_a < cost_w < np.inf):
            continue
        price = (cost_w - cost_a) / (excess_a - excess_w)
        crossing_s = cost_a + price * excess_a
        least_s = min(cost_s + price * excess for cost_s, excess, _ in known)
        if best_s < crossing_s <= least_s + 1e-12 * abs(least_s):
            best_s, around = crossing_s, (above, within)
    return around


def least_memory(table: CostTable, order: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Bytes of the choice that takes least, and the choice; `inf` when everything is forbidden."""
    elimination = eliminate(memory_only(table), order)
    return elimination.value, argmin(elimination)


def memory_only(table: CostTable) -> CostTable:
    """The table with memory in place of cost, the same forbidden."""
    nodes = tuple(replace(node, cost_s=np.where(np.isinf(node.cost_s), np.inf, node.memory_bytes)) for node in table.nodes)
    edges = tuple(replace(edge, cost_s=np.where(np.isinf(edge.cost_s), np.inf, edge.memory_bytes)) for edge in table.edges)
    return replace(table, nodes=nodes, edges=edges)


def from_least_memory(table: CostTable) -> CostTable:
    """Memory counted from each node's and edge's least: price * limit would otherwise drown the costs it is compared with."""
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


def _crossing(table: CostTable, over: tuple[int, ...], within: tuple[int, ...]) -> float:
    """The price at which a choice above the limit and one within it cost the same."""
    saved = memory_of(table, over) - memory_of(table, within)
    return (cost_of(table, within) - cost_of(table, over)) / saved if saved > 0 else 0.0
