"""The search problem as numbers only: no torch, no graph."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Node:
    """Something to choose: `cost_s[k]` seconds and `memory_bytes[k]` if strategy k is taken
    (folded counts included).
    """

    name: str
    cost_s: np.ndarray  # f64[K]
    memory_bytes: np.ndarray  # f64[K]


@dataclass(frozen=True)
class Edge:
    """What a pair of choices costs together. Nodes `a` < `b`; at most one edge a pair."""

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
    """One strategy index per node; `lower_bound_s` is proven: no choice within the limit costs less.

    `around`: where the memory limit binds, a choice above it and one within it that cost the same at the price of
    memory which gives the bound. What can be divided between the two, so that the limit is just filled, costs no more
    than the bound.
    """

    strategies: tuple[int, ...]
    cost_s: float
    memory_bytes: float
    lower_bound_s: float
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def gap(self) -> float:
        """Relative distance to the bound, 0 when proven optimal."""
        return (self.cost_s - self.lower_bound_s) / self.cost_s if self.cost_s > 0 else 0.0


def cost_of(table: CostTable, strategies: tuple[int, ...]) -> float:
    """Seconds of one complete choice."""
    nodes = sum(float(node.cost_s[k]) for node, k in zip(table.nodes, strategies))
    return nodes + sum(float(e.cost_s[strategies[e.a], strategies[e.b]]) for e in table.edges)


def memory_of(table: CostTable, strategies: tuple[int, ...]) -> float:
    """Bytes per device of one complete choice."""
    nodes = sum(float(node.memory_bytes[k]) for node, k in zip(table.nodes, strategies))
    return nodes + sum(float(e.memory_bytes[strategies[e.a], strategies[e.b]]) for e in table.edges)
