"""The best lower bound that a price on memory proves, and the choices met on the way.

For a price p >= 0 in seconds a byte, min over choices of cost + p * (memory - limit) is at most the cost of any choice within the limit
(weak duality). As a function of p it is concave and piecewise linear, and elimination evaluates it together with a choice, which is a line
above it. Following the crossing of the best lines from both sides ends at the maximum after finitely many steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
# A table with fewer pairs of strategies is soon so small that it is eliminated: a few sweeps of messages are enough to get there.
_SMALL_PAIRS = 1e7
_FEW_SWEEPS, _MANY_SWEEPS = 12, 60

_Part = TypeVar("_Part", Node, Edge)


@dataclass(frozen=True, eq=False)
class Step:
    """What is known at one price: no choice has a lower objective than `value`; a few choices `met`, best first; what says so."""

    value: float
    met: tuple[tuple[int, ...], ...]
    source: Elimination | Passed


Evaluate = Callable[[CostTable, float], Step]


@dataclass(frozen=True, eq=False)
class Dual:
    """The step at the best price, and all choices `met`, latest last.

    The objective of the step exceeds that of the bound by `rebate_s`: price * limit, less than that by what rounding may have added.
    """

    step: Step
    price: float
    rebate_s: float
    met: tuple[tuple[int, ...], ...]
    is_best: bool

    @property
    def bound_s(self) -> float:
        """No choice within the limit costs less; `inf` when everything is forbidden."""
        return self.step.value - self.rebate_s


def by_elimination(order: Sequence[int]) -> Evaluate:
    """Evaluate a price exactly."""

    def evaluate(table: CostTable, price: float) -> Step:
        elimination = eliminate(table, order, multiplier=price)
        return Step(elimination.value, (argmin(elimination),), elimination)

    return evaluate


def _is_small(table: CostTable) -> bool:
    return sum(edge.cost_s.size for edge in table.edges) < _SMALL_PAIRS


def by_messages(best: tuple[int, ...] | None, deadline: float = float("inf")) -> Evaluate:
    """Evaluate a price by passing messages; what costs more than `best`, a choice within the limit, does not matter."""

    def evaluate(table: CostTable, price: float) -> Step:
        ceiling = float("inf")
        if best is not None:
            ceiling = cost_of(table, best) + (price * table.memory_limit_bytes if price else 0.0)
        known, most_sweeps = () if best is None else (best,), _FEW_SWEEPS if _is_small(table) else _MANY_SWEEPS
        passed = pass_messages(table, multiplier=price, known=known, ceiling=ceiling, most_sweeps=most_sweeps, deadline=deadline)
        return Step(passed.value, passed.met[:_MOST_MET], passed)

    return evaluate


def maximise(
    table: CostTable, evaluate: Evaluate, *, feasible: tuple[int, ...] | None, most_steps: int = 40, deadline: float = float("inf")
) -> Dual:
    """Maximise the bound over the price, the first step at price 0.

    `feasible`: a choice within the limit, without which there is no other price to try. The bound is valid, if not the best, after any
    number of steps; no step begins after `deadline` (of `time.monotonic`).
    """
    light = from_least_memory(table)
    limit = light.memory_limit_bytes
    free = evaluate(light, 0.0)
    best, over = Dual(free, 0.0, 0.0, free.met, is_best=True), free.met[0]
    if feasible is None or not np.isfinite(cost_of(light, over)) or memory_of(light, over) <= limit:
        return best
    within = feasible
    for _ in range(most_steps - 1):
        price = _crossing(light, over, within)
        if price <= 0.0:
            return replace(best, is_best=True)
        if monotonic() > deadline:
            break
        step = evaluate(light, price)
        latest = Dual(step, price, price * limit * (1 + ROUNDING), (*best.met, *step.met), is_best=False)
        best = latest if latest.bound_s > best.bound_s else replace(best, met=latest.met, is_best=False)
        line = cost_of(light, within) + price * memory_of(light, within)
        met = step.met[0]
        if line - (cost_of(light, met) + price * memory_of(light, met)) <= 1e-12 * abs(line):
            return replace(best, is_best=True)
        over, within = (over, met) if memory_of(light, met) <= limit else (met, within)
    return best


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
