"""Edges compressed by classes of strategies whose rows (or columns) of the edge are equal.

An edge depends on a strategy through the layout of one value only, so that 512 strategies often form 27 to 216 classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.table import CostTable, Edge


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of a node's strategies: `index[k]` is the class of strategy k.

    `grouped` lists the strategies class by class; `starts` are the positions of the classes in it.
    """

    index: np.ndarray  # i64[K]
    grouped: np.ndarray  # i64[K]
    starts: np.ndarray  # i64[number of classes]

    def least(self, values: np.ndarray) -> np.ndarray:
        """The least of `values` in each class, f64[number of classes]."""
        return values if self.starts.size == self.index.size else np.minimum.reduceat(values[self.grouped], self.starts)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """The value of its class for each strategy, f64[K]."""
        return values if self.starts.size == self.index.size else values[self.index]


@dataclass(frozen=True, eq=False)
class Compact:
    """An edge compressed to the classes of its ends; cost and memory are f64[classes of a, classes of b]."""

    a: int
    b: int
    cost_s: np.ndarray
    memory_bytes: np.ndarray
    of_a: Classes
    of_b: Classes


def compacted(table: CostTable) -> tuple[Compact, ...]:
    """The compressed edges of a checked table; edges that share their arrays are compressed once."""
    known: dict[tuple[int, int], Compact] = {}
    edges = []
    for edge in table.edges:
        arrays = id(edge.cost_s), id(edge.memory_bytes)
        if arrays not in known:
            known[arrays] = _compact(edge)
        shared = known[arrays]
        edges.append(Compact(edge.a, edge.b, shared.cost_s, shared.memory_bytes, shared.of_a, shared.of_b))
    return tuple(edges)


def _compact(edge: Edge) -> Compact:
    kept_a, of_a = _classes([edge.cost_s, edge.memory_bytes])
    cost, memory = edge.cost_s[kept_a], edge.memory_bytes[kept_a]
    kept_b, of_b = _classes([cost.T, memory.T])
    return Compact(
        edge.a, edge.b, np.ascontiguousarray(cost[:, kept_b]), np.ascontiguousarray(memory[:, kept_b]), of_a, of_b
    )


def _classes(matrices: Sequence[np.ndarray]) -> tuple[np.ndarray, Classes]:
    """(first row of each class, classes of rows): rows that are equal in all matrices form a class."""
    rows = np.hstack([matrix for matrix in matrices if matrix.any()] or matrices[:1])
    _, first, index = np.unique(_hashes(rows), return_index=True, return_inverse=True)
    rank = np.argsort(first)
    first, index = first[rank], np.argsort(rank)[index]
    if first.size < index.size and not np.array_equal(rows[first[index]], rows):  # a collision of hashes
        first, index = np.arange(index.size), np.arange(index.size)
    grouped = np.argsort(index, kind="stable")
    return first, Classes(index, grouped, np.searchsorted(index[grouped], np.arange(first.size)))


def _hashes(rows: np.ndarray) -> np.ndarray:
    """u64[number of rows]: equal rows have equal hashes."""
    odd = np.random.default_rng(0).integers(0, 2**63, rows.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    bits = np.ascontiguousarray(rows + 0.0).view(np.uint64)  # + 0.0: one zero, not two
    # whole numbers have their bits at the top, where a product overflows
    return ((bits ^ (bits >> np.uint64(32))) * odd).sum(axis=1)
