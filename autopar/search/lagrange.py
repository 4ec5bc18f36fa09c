"""The best lower bound that a price on memory proves, and the choices met on the way.

For a price p >= 0 in seconds a byte, min over choices of cost + p * (memory - limit) is at most the cost of any choice within the limit
(weak duality). As a function of p it is concave and piecewise linear, and elimination evaluates it together with a choice, which is a line
above it. Following the crossing of the best lines from both sides ends at the maximum after finitely many steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

import numpy as np

from autopar.search.eliminate import Elimination, argmin, eliminate
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of

# Of price * limit, what rounding may have added to a bound: the sums have some hundred terms of 2^-53 relative error each.
_ROUNDING = 1e-13

_Part = TypeVar("_Part", Node, Edge)


@dataclass(frozen=True, eq=False)
class Dual:
    """The elimination at the best price, and the choices `met` at each price, latest last.

    The objective of the elimination exceeds that of the bound by `rebate_s`: price * limit, less than that by what rounding may have added.
    """

    elimination: Elimination
    rebate_s: float
    met: tuple[tuple[int, ...], ...]
    is_best: bool

    @property
    def bound_s(self) -> float:
        """No choice within the limit costs less; `inf` when everything is forbidden."""
        return self.elimination.value - self.rebate_s


def maximise(
    table: CostTable, order: Sequence[int], *, feasible: tuple[int, ...] | None, most_steps: int = 40, deadline: float = float("inf")
) -> Dual:
    """Maximise the bound over the price, the first step at price 0.

    `feasible`: a choice within the limit, without which there is no other price to try. The bound is valid, if not the best, after any
    number of steps; no step begins after `deadline` (of `time.monotonic`).
    """
    light = _from_least_memory(table)
    limit = light.memory_limit_bytes
    free = eliminate(light, order)
    over = argmin(free)
    best = Dual(free, 0.0, (over,), is_best=True)
    if feasible is None or not np.isfinite(free.value) or memory_of(light, over) <= limit:
        return best
    within = feasible
    for _ in range(most_steps - 1):
        price = _crossing(light, over, within)
        if price <= 0.0:
            return replace(best, is_best=True)
        if monotonic() > deadline:
            break
        step = eliminate(light, order, multiplier=price)
        met = argmin(step)
        line = cost_of(light, within) + price * memory_of(light, within)
        latest = Dual(step, price * limit * (1 + _ROUNDING), (*best.met, met), is_best=False)
        best = latest if latest.bound_s > best.bound_s else replace(best, met=latest.met, is_best=False)
        if line - step.value <= 1e-12 * abs(line):
            return replace(best, is_best=True)
        over, within = (over, met) if memory_of(light, met) <= limit else (met, within)
    return best


def least_memory(table: CostTable, order: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Bytes of the choice that takes least, and the choice; `inf` when everything is forbidden."""
    nodes = tuple(replace(node, cost_s=np.where(np.isinf(node.cost_s), np.inf, node.memory_bytes)) for node in table.nodes)
    edges = tuple(replace(edge, cost_s=np.where(np.isinf(edge.cost_s), np.inf, edge.memory_bytes)) for edge in table.edges)
    elimination = eliminate(replace(table, nodes=nodes, edges=edges), order)
    return elimination.value, argmin(elimination)


def _from_least_memory(table: CostTable) -> CostTable:
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
