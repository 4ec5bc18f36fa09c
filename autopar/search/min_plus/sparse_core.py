"""What is left of a table without a memory limit once every node with few neighbours is eliminated: a smaller table of
the same optimum.

A node beside one or two others leaves a function of these, which is a node's or an edge's term: what is left is a table
again. Of models, where most values are used once, that is a tenth.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.min_plus.eliminate import Elimination, argmin, eliminate
from autopar.search.table import CostTable, Edge, Node

# A node that takes more additions stays: half a millisecond, and two nodes between which a dense edge is no larger than
# most edges are.
_MOST_ADDITIONS = 3e5


@dataclass(frozen=True, eq=False)
class Core:
    """`table` holds the `nodes` (indices, ascending) that are left; its memory is 0 throughout."""

    table: CostTable
    nodes: tuple[int, ...]
    elimination: Elimination

    def lower(self, strategies: Sequence[int]) -> tuple[int, ...]:
        """The part of a choice that is left. What `lift` makes of it costs no more than the choice."""
        return tuple(strategies[v] for v in self.nodes)

    def lift(self, strategies: Sequence[int]) -> tuple[int, ...]:
        """The cheapest choice of the whole table that contains these."""
        return argmin(self.elimination, dict(zip(self.nodes, strategies)))


def core(table: CostTable) -> Core:
    """Eliminate the nodes that have one or two neighbours when their turn comes, least work first."""
    elimination = eliminate(table, _sparse_order(table))
    nodes = tuple(sorted({v for factor in elimination.rest for v in factor.scope}))
    number = {v: i for i, v in enumerate(nodes)}
    terms: dict[tuple[int, ...], np.ndarray] = {}
    for factor in elimination.rest:
        scope = tuple(number[v] for v in factor.scope)
        terms[scope] = terms[scope] + factor.values if scope in terms else factor.values
    kept = tuple(Node(table.nodes[v].name, terms[i,], np.zeros_like(terms[i,])) for i, v in enumerate(nodes))
    edges = tuple(Edge(*scope, cost, np.zeros_like(cost)) for scope, cost in sorted(terms.items()) if len(scope) == 2)
    return Core(CostTable(kept, edges), nodes, elimination)


def _sparse_order(table: CostTable) -> tuple[int, ...]:
    """Nodes to eliminate, each with one or two neighbours by then; the last of a connected component stays."""
    sizes = [node.cost_s.size for node in table.nodes]
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for edge in table.edges:
        near[edge.a].add(edge.b)
        near[edge.b].add(edge.a)

    def additions(v: int) -> float:
        few = 1 <= len(near[v]) <= 2
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
