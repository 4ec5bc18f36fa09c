"""Pruning: making a table smaller without losing its optimum."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.table import CostTable, Edge, Node

# The most comparisons of entries for one node's strategies: about 5 ms.
_COMPARISONS = 2e6


@dataclass(frozen=True, eq=False)
class Reduced:
    """A pruned table; `kept[v]` are the strategies of node v as indices of the original table.

    `position[v][k]`: index in the pruned table of strategy k or of the one that replaces it, which is at least as good;
    -1 if k was dropped without replacement.
    """

    table: CostTable
    kept: tuple[np.ndarray, ...]  # i64[K_small]
    position: tuple[np.ndarray, ...]  # i64[K_original]

    def lift(self, strategies: Sequence[int]) -> tuple[int, ...]:
        """A choice of the pruned table in terms of the original table."""
        return tuple(int(kept[k]) for kept, k in zip(self.kept, strategies))

    def lower(self, strategies: Sequence[int]) -> tuple[int, ...] | None:
        """A choice of the original table, or one at least as good, in terms of the pruned table.

        None if it was dropped.
        """
        small = tuple(int(position[k]) for position, k in zip(self.position, strategies))
        return None if -1 in small else small


def unreduced(table: CostTable) -> Reduced:
    """The unpruned table as a `Reduced`."""
    every = tuple(np.arange(node.cost_s.size) for node in table.nodes)
    return Reduced(table, every, every)


def restrict(reduced: Reduced, kept: Sequence[np.ndarray], successor: Sequence[np.ndarray] | None = None) -> Reduced:
    """`reduced` with only the strategies `kept` (ascending).

    `successor[v][k]` replaces a dropped k (-1: nothing does).
    """
    nodes = tuple(Node(n.name, n.cost_s[k], n.memory_bytes[k]) for n, k in zip(reduced.table.nodes, kept))
    is_whole = [keep.size == node.cost_s.size for node, keep in zip(reduced.table.nodes, kept)]
    edges = tuple(e if is_whole[e.a] and is_whole[e.b] else _sliced(e, kept) for e in reduced.table.edges)
    position = []
    for v, (old, keep) in enumerate(zip(reduced.position, kept)):
        if is_whole[v]:
            position.append(old)
            continue
        renumbered = np.full(reduced.table.nodes[v].cost_s.size + 1, -1)  # the last entry is for index -1
        renumbered[keep] = np.arange(keep.size)
        follow = np.arange(renumbered.size - 1) if successor is None else successor[v]
        position.append(renumbered[np.append(follow, -1)][old])
    table = replace(reduced.table, nodes=nodes, edges=edges)
    return Reduced(table, tuple(old[keep] for old, keep in zip(reduced.kept, kept)), tuple(position))


def _sliced(edge: Edge, kept: Sequence[np.ndarray]) -> Edge:
    pairs = np.ix_(kept[edge.a], kept[edge.b])
    return Edge(edge.a, edge.b, edge.cost_s[pairs], edge.memory_bytes[pairs])


def reduce(reduced: Reduced) -> Reduced:
    """`reduced` without forbidden and dominated strategies, dropped until nothing changes.

    Strategy j dominates k if j costs no more than k for every choice of the neighbours and, under a memory limit, takes
    no more memory (the dead-end elimination criterion of R. Goldstein, 1994). InfeasibleError if a node has no strategy
    left.
    """
    before = -1
    while (size := sum(kept.size for kept in reduced.kept)) != before:
        before = size
        for v in range(len(reduced.table.nodes)):
            reduced = _reduce_node(reduced, v)
    return reduced


def _reduce_node(reduced: Reduced, v: int) -> Reduced:
    table, node = reduced.table, reduced.table.nodes[v]
    rows, memory, starts = _incident(table, v)
    if starts.size:
        usable = np.isfinite(node.cost_s) & np.isfinite(np.minimum.reduceat(rows, starts, axis=1)).all(axis=1)
    else:
        usable = np.isfinite(node.cost_s)
    if not usable.any():
        raise InfeasibleError(
            f"no strategy of {node.name!r} is allowed together with its neighbours; remove a pin around it"
        )
    successor = np.where(usable, np.arange(usable.size), -1)
    for j in _challengers(node, rows, starts, usable):
        if successor[j] == j:
            losers = _dominated(
                table, node, rows, memory, starts, j, np.flatnonzero(successor == np.arange(usable.size))
            )
            successor[np.isin(successor, losers)] = j
    kept = np.flatnonzero(successor == np.arange(usable.size))
    if kept.size == usable.size:
        return reduced
    every = [np.arange(other.cost_s.size) for other in table.nodes]
    return restrict(reduced, [*every[:v], kept, *every[v + 1 :]], [*every[:v], successor, *every[v + 1 :]])


def _incident(table: CostTable, v: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(costs, memory, first columns): the node's edges side by side, f64[K, sum of the neighbours' K]."""
    edges = [edge for edge in table.edges if v in (edge.a, edge.b)]
    if not edges:
        empty = np.zeros((table.nodes[v].cost_s.size, 0))
        return empty, empty, np.zeros(0, np.int64)
    costs = [edge.cost_s if edge.a == v else edge.cost_s.T for edge in edges]
    memory = [edge.memory_bytes if edge.a == v else edge.memory_bytes.T for edge in edges]
    return np.hstack(costs), np.hstack(memory), np.cumsum([0, *(cost.shape[1] for cost in costs[:-1])])


def _challengers(node: Node, rows: np.ndarray, starts: np.ndarray, usable: np.ndarray) -> list[int]:
    """The strategies most likely to dominate: all, or the cheapest if all would take too many comparisons."""
    least = node.cost_s + (np.minimum.reduceat(rows, starts, axis=1).sum(axis=1) if starts.size else 0.0)
    ranked = [int(j) for j in np.argsort(least, kind="stable") if usable[j]]
    return ranked[: max(1, int(_COMPARISONS // max(1, rows.size)))]


def _dominated(
    table: CostTable, node: Node, rows: np.ndarray, memory: np.ndarray, starts: np.ndarray, j: int, alive: np.ndarray
) -> np.ndarray:
    """The strategies among `alive` that j dominates."""
    others = alive[alive != j]
    worse = _most_lost(rows[j], rows[others], rows[others], starts) + node.cost_s[j] - node.cost_s[others]
    others = others[worse <= 0]
    if np.isinf(table.memory_limit_bytes):
        return others
    heavier = (
        _most_lost(memory[j], memory[others], rows[others], starts) + node.memory_bytes[j] - node.memory_bytes[others]
    )
    return others[heavier <= 0]


def _most_lost(row: np.ndarray, others: np.ndarray, costs: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """f64[len(others)]: the sum over edges of the largest row - other, at the entries that other allows."""
    if not starts.size or not len(others):
        return np.zeros(len(others))
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isinf(costs), -np.inf, row - others)
    return np.maximum.reduceat(difference, starts, axis=1).sum(axis=1)
