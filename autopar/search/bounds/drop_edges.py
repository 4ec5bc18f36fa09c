"""A relaxation of a table that is too dense to eliminate, by dropping edges."""

from dataclasses import replace

import numpy as np

from autopar.search.min_plus.eliminate import Limits, elimination_order
from autopar.search.table import CostTable, Edge, Node


def tractable(table: CostTable, limits: Limits) -> tuple[CostTable, tuple[int, ...]]:
    """(the table, or a relaxation with as few edges dropped as `limits` require; its elimination order).

    The least cost and memory of a dropped edge for each strategy of `a` are added to node `a`. No choice costs or takes
    more than before, so the relaxation's optimum is a lower bound. Edges whose costs vary least are dropped first.
    """
    by_weight = sorted(range(len(table.edges)), key=lambda i: (_spread(table.edges[i]), i))
    low, high = 0, len(by_weight)  # dropping `high` edges is always enough
    while low < high:
        middle = (low + high) // 2
        fits = elimination_order(_without(table, by_weight[:middle]), limits) is not None
        low, high = (low, middle) if fits else (middle + 1, high)
    relaxed = _without(table, by_weight[:low])
    order = elimination_order(relaxed, limits)
    return relaxed, order if order is not None else tuple(range(len(table.nodes)))


def _spread(edge: Edge) -> float:
    finite = edge.cost_s[np.isfinite(edge.cost_s)]
    return float("inf") if finite.size < edge.cost_s.size else float(np.ptp(finite))


def _without(table: CostTable, dropped: list[int]) -> CostTable:
    nodes = list(table.nodes)
    for i in dropped:
        edge, node = table.edges[i], nodes[table.edges[i].a]
        memory = np.where(np.isinf(edge.cost_s), np.inf, edge.memory_bytes).min(axis=1)
        memory[np.isinf(memory)] = 0.0  # a strategy without any allowed pair has infinite cost already
        nodes[edge.a] = Node(node.name, node.cost_s + edge.cost_s.min(axis=1), node.memory_bytes + memory)
    gone = set(dropped)
    return replace(table, nodes=tuple(nodes), edges=tuple(edge for i, edge in enumerate(table.edges) if i not in gone))
