"""Validation of a cost table at the entry of the search, and one canonical form for forbidden entries."""

import math

import numpy as np

from autopar.search.table import CostTable, Edge, Node


def checked(table: CostTable) -> CostTable:
    """The same table in float64, in which every forbidden entry costs `inf` and has memory 0.

    ValueError for shapes that do not match, NaN or -inf, edges out of order and pairs of nodes with two edges.
    """
    if math.isnan(table.memory_limit_bytes):
        raise ValueError("memory_limit_bytes: expected a number of bytes or inf, found nan")
    nodes = tuple(_node(node) for node in table.nodes)
    edges = tuple(_edge(edge, nodes) for edge in table.edges)
    pairs = [(edge.a, edge.b) for edge in edges]
    if len(set(pairs)) < len(pairs):
        twice = next(pair for pair in pairs if pairs.count(pair) > 1)
        raise ValueError(f"nodes {twice}: expected at most one edge a pair, found {pairs.count(twice)}; add them up")
    return CostTable(nodes, edges, float(table.memory_limit_bytes))


def _node(node: Node) -> Node:
    cost, memory = _canonical(f"node {node.name!r}", node.cost_s, node.memory_bytes)
    if cost.ndim != 1 or not cost.size:
        raise ValueError(
            f"node {node.name!r}: expected one cost a strategy and at least one strategy, found shape {cost.shape}"
        )
    return Node(node.name, cost, memory)


def _edge(edge: Edge, nodes: tuple[Node, ...]) -> Edge:
    where = f"edge ({edge.a}, {edge.b})"
    if not 0 <= edge.a < edge.b < len(nodes):
        raise ValueError(f"{where}: expected node indices 0 <= a < b < {len(nodes)}")
    cost, memory = _canonical(where, edge.cost_s, edge.memory_bytes)
    expected = (nodes[edge.a].cost_s.size, nodes[edge.b].cost_s.size)
    if cost.shape != expected:
        raise ValueError(f"{where}: expected costs of shape {expected}, found {cost.shape}")
    return Edge(edge.a, edge.b, cost, memory)


def _canonical(where: str, cost: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cost, memory = np.asarray(cost, np.float64), np.asarray(memory, np.float64)
    if cost.shape != memory.shape:
        raise ValueError(f"{where}: expected costs and memory of one shape, found {cost.shape} and {memory.shape}")
    for what, values in (("cost_s", cost), ("memory_bytes", memory)):
        if np.isnan(values).any() or np.isneginf(values).any():
            raise ValueError(f"{where}: expected {what} to be finite or inf (forbidden), found nan or -inf")
    forbidden = np.isinf(cost) | np.isinf(memory)
    if not forbidden.any():
        return cost, memory
    return np.where(forbidden, np.inf, cost), np.where(forbidden, 0.0, memory)
