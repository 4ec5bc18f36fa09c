"""The core of a table without a memory limit: the table with every node of few neighbours eliminated.

Eliminating a node with one or two neighbours leaves a function of these, which is the term of a node or an edge, so
that the core is a table with the same optimum. In models, where most values are used once, it has a tenth of the nodes.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.min_plus.eliminate import Elimination, argmin, eliminate
from autopar.search.table import CostTable, Edge, Node

# A node whose elimination takes more additions stays. They take half a millisecond, and the resulting edge is no larger
# than most edges.
_MOST_ADDITIONS = 3e5


@dataclass(frozen=True, eq=False)
class Core:
    """The `table` of the `nodes` (indices, ascending) that are left; its memory is 0 throughout."""

    table: CostTable
    nodes: tuple[int, ...]
    elimination: Elimination

    def lower(self, strategies: Sequence[int]) -> tuple[int, ...]:
        """The part of a choice in the core; `lift` completes it to a choice that costs no more."""
        return tuple(strategies[v] for v in self.nodes)

    def lift(self, strategies: Sequence[int]) -> tuple[int, ...]:
        """The cheapest choice of the whole table that contains these strategies of the core."""
        return argmin(self.elimination, dict(zip(self.nodes, strategies)))


def core(table: CostTable, *, kept: Collection[int] = ()) -> Core:
    """The core of `table`: nodes but those `kept` that have one or two neighbours at their turn are eliminated, least
    work first.
    """
    elimination = eliminate(table, _sparse_order(table, kept))
    nodes = tuple(sorted({v for factor in elimination.rest for v in factor.scope}))
    number = {v: i for i, v in enumerate(nodes)}
    terms: dict[tuple[int, ...], np.ndarray] = {}
    for factor in elimination.rest:
        scope = tuple(number[v] for v in factor.scope)
        terms[scope] = terms[scope] + factor.values if scope in terms else factor.values
    left = tuple(Node(table.nodes[v].name, terms[i,], np.zeros_like(terms[i,])) for i, v in enumerate(nodes))
    edges = tuple(Edge(*scope, cost, np.zeros_like(cost)) for scope, cost in sorted(terms.items()) if len(scope) == 2)
    return Core(CostTable(left, edges), nodes, elimination)


def _sparse_order(table: CostTable, kept: Collection[int]) -> tuple[int, ...]:
    """Nodes to eliminate, each with one or two neighbours by then; those `kept` and the last of a connected component
    stay.
    """
    sizes = [node.cost_s.size for node in table.nodes]
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for edge in table.edges:
        near[edge.a].add(edge.b)
        near[edge.b].add(edge.a)

    def additions(v: int) -> float:
        few = 1 <= len(near[v]) <= 2 and v not in kept
        return math.prod(sizes[u] for u in (v, *near[v])) if few else math.inf

    waiting = [(additions(v), v) for v in near]
    heapq.heapify(waiting)
    order = []
    while waiting:
        work, v = heapq.heappop(waiting)
        if v not in near or work != additions(v) or work > _MOST_ADDITIONS:
            continue
        order.append(v)
        beside = near.pop(v)
        for u in beside:
            near[u] = (near[u] | beside) - {u, v}
        for u in beside:
            heapq.heappush(waiting, (additions(u), u))
    return tuple(order)
