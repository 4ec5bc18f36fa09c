"""The best lower bound that a price on memory proves, and the choices met on the way.

For a price p >= 0 in seconds a byte, min over choices of cost + p * (memory - limit) is at most the cost of any choice within the limit
(weak duality). As a function of p it is concave and piecewise linear, and elimination evaluates it together with a choice, which is a line
above it. Following the crossing of the best lines from both sides ends at the maximum after finitely many steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.eliminate import argmin, eliminate
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of


@dataclass(frozen=True)
class Dual:
    """`bound_s` is proven at price `multiplier` (seconds a byte); `met` are the choices of every step, latest last."""

    bound_s: float
    multiplier: float
    met: tuple[tuple[int, ...], ...]


def maximise(table: CostTable, order: Sequence[int], *, feasible: tuple[int, ...] | None, most_steps: int = 40) -> Dual:
    """Maximise the bound over the price. `feasible`: a choice within the limit, without which there is no price to try but 0.

    The bound is valid, if not the best, after any number of steps.
    """
    limit = table.memory_limit_bytes
    free = eliminate(table, order)
    over = argmin(free)
    best = Dual(free.value, 0.0, (over,))
    if feasible is None or not np.isfinite(free.value) or memory_of(table, over) <= limit:
        return best
    within = feasible
    for _ in range(most_steps - 1):
        multiplier = _crossing(table, over, within)
        if multiplier <= 0.0:
            return best
        step = eliminate(table, order, multiplier=multiplier)
        met = argmin(step)
        bound_s = step.value - multiplier * limit
        line = cost_of(table, within) + multiplier * (memory_of(table, within) - limit)
        best = Dual(max(bound_s, best.bound_s), multiplier if bound_s >= best.bound_s else best.multiplier, (*best.met, met))
        if line - bound_s <= 1e-12 * abs(line):
            return best
        over, within = (over, met) if memory_of(table, met) <= limit else (met, within)
    return best


def least_memory(table: CostTable, order: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Bytes of the choice that takes least, and the choice; `inf` when everything is forbidden."""
    swapped = memory_table(table)
    elimination = eliminate(swapped, order)
    return elimination.value, argmin(elimination)


def memory_table(table: CostTable) -> CostTable:
    """The table whose cost is the memory, with the same entries forbidden."""
    nodes = tuple(Node(n.name, np.where(np.isinf(n.cost_s), np.inf, n.memory_bytes), n.memory_bytes) for n in table.nodes)
    edges = tuple(Edge(e.a, e.b, np.where(np.isinf(e.cost_s), np.inf, e.memory_bytes), e.memory_bytes) for e in table.edges)
    return replace(table, nodes=nodes, edges=edges)


def _crossing(table: CostTable, over: tuple[int, ...], within: tuple[int, ...]) -> float:
    """The price at which a choice above the limit and one within it cost the same."""
    saved = memory_of(table, over) - memory_of(table, within)
    return (cost_of(table, within) - cost_of(table, over)) / saved if saved > 0 else 0.0
