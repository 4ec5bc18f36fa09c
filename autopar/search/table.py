"""`CostTable`: the search problem in numbers, without torch or graph."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Node:
    """A decision: strategy k costs `cost_s[k]` seconds and `memory_bytes[k]`, for all members of a folded class."""

    name: str
    cost_s: np.ndarray  # f64[K]
    memory_bytes: np.ndarray  # f64[K]


@dataclass(frozen=True)
class Edge:
    """The cost and memory of the strategies of two nodes together; `a` < `b`, at most one edge for each pair."""

    a: int
    b: int
    cost_s: np.ndarray  # f64[Ka, Kb]
    memory_bytes: np.ndarray  # f64[Ka, Kb]


@dataclass(frozen=True)
class CostTable:
    """Minimise the sum of node and edge costs; the sum of node and edge memory stays within `memory_limit_bytes`."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    memory_limit_bytes: float = float("inf")


@dataclass(frozen=True)
class Choice:
    """A solution of a table: one strategy index for each node.

    `lower_bound_s` is proven: no choice within the limit costs less. `around`: if the memory limit binds, a choice
    above it and one within it with equal objectives at the price of memory that gives the bound. A mixture of the two
    that just fills the limit would cost no more than the bound.
    """

    strategies: tuple[int, ...]
    cost_s: float
    memory_bytes: float
    lower_bound_s: float
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def gap(self) -> float:
        """The distance to the bound as a share of the cost; 0 if proven optimal."""
        return (self.cost_s - self.lower_bound_s) / self.cost_s if self.cost_s > 0 else 0.0


def cost_of(table: CostTable, strategies: tuple[int, ...]) -> float:
    """Seconds of a choice: one strategy index for each node."""
    nodes = sum(float(node.cost_s[k]) for node, k in zip(table.nodes, strategies))
    return nodes + sum(float(e.cost_s[strategies[e.a], strategies[e.b]]) for e in table.edges)


def memory_of(table: CostTable, strategies: tuple[int, ...]) -> float:
    """Bytes on a device of a choice: one strategy index for each node."""
    nodes = sum(float(node.memory_bytes[k]) for node, k in zip(table.nodes, strategies))
    return nodes + sum(float(e.memory_bytes[strategies[e.a], strategies[e.b]]) for e in table.edges)
