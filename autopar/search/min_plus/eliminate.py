"""The exact optimum of a table without a memory limit, by eliminating node after node in min-plus algebra.

Bucket elimination (R. Dechter, "Bucket elimination: a unifying framework for reasoning", 1999). A node is removed by
replacing the terms it takes part in by their minimum over its strategies, a function of its neighbours. The order
decides the size of these functions; on nearly series-parallel graphs they depend on two nodes each.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import numpy as np

from autopar.search.min_plus.factors import Factor, contract
from autopar.search.table import CostTable

# The most dims of a numpy array. Nodes with one strategy give small factors of many dims.
_MOST_DIMS = 64


@dataclass(frozen=True)
class Limits:
    """Limits of an elimination: entries of one factor, and additions in all (a core does about 5e8 a second)."""

    entries: float = 5e7
    additions: float = 5e9


@dataclass(frozen=True, eq=False)
class Bucket:
    """The terms that were minimised over `node`, and the result, a function of its neighbours left at that time."""

    node: int
    factors: tuple[Factor, ...]
    message: Factor


@dataclass(frozen=True, eq=False)
class Elimination:
    """The optimum `value` (`inf`: every choice is forbidden) and the buckets in elimination order.

    `rest`: the terms of the nodes that were not eliminated, which are not part of the value.
    """

    value: float
    buckets: tuple[Bucket, ...]
    rest: tuple[Factor, ...] = ()


def elimination_order(
    table: CostTable, limits: Limits = Limits(), *, kept: Collection[int] = ()
) -> tuple[int, ...] | None:
    """The greedy elimination order of all nodes but those `kept`, smallest resulting factor first; None if it exceeds
    the limits.
    """
    sizes = [node.cost_s.size for node in table.nodes]
    neighbours: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for edge in table.edges:
        neighbours[edge.a].add(edge.b)
        neighbours[edge.b].add(edge.a)
    entries = {v: math.prod(float(sizes[u]) for u in near) for v, near in neighbours.items() if v not in kept}
    waiting = [(size, v) for v, size in entries.items()]
    heapq.heapify(waiting)
    order, additions = [], 0.0
    while waiting:
        size, node = heapq.heappop(waiting)
        if entries.get(node) != size:
            continue  # eliminated, or in the queue with another size
        additions += size * sizes[node]
        if size > limits.entries or additions > limits.additions or len(neighbours[node]) >= _MOST_DIMS:
            return None
        del entries[node]
        near = neighbours.pop(node)
        for u in near:
            neighbours[u] |= near - {u}
            neighbours[u].discard(node)
            if u in kept:
                continue
            entries[u] = math.prod(float(sizes[w]) for w in neighbours[u])
            heapq.heappush(waiting, (entries[u], u))
        order.append(node)
    return tuple(order)


def eliminate(table: CostTable, order: Sequence[int], *, multiplier: float = 0.0) -> Elimination:
    """The minimum of cost + multiplier * memory (seconds, and seconds a byte) over the nodes in `order`, all or some.

    The memory limit itself is ignored.
    """
    waiting = {
        v: [Factor((v,), _weighted(node.cost_s, node.memory_bytes, multiplier))] for v, node in enumerate(table.nodes)
    }
    rank = {node: len(order) for node in waiting} | {node: i for i, node in enumerate(order)}
    for edge in table.edges:
        factor = Factor((edge.a, edge.b), _weighted(edge.cost_s, edge.memory_bytes, multiplier))
        waiting[min(factor.scope, key=rank.__getitem__)].append(factor)
    value, buckets = 0.0, []
    for node in order:
        factors = tuple(waiting.pop(node))
        scope = tuple(sorted({v for factor in factors for v in factor.scope} - {node}))
        bucket = Bucket(node, factors, contract(factors, scope))
        buckets.append(bucket)
        if scope:
            waiting[min(scope, key=rank.__getitem__)].append(bucket.message)
        else:
            value += float(bucket.message.values)
    return Elimination(value, tuple(buckets), tuple(chain.from_iterable(waiting.values())))


def argmin(elimination: Elimination, given: Mapping[int, int] = MappingProxyType({})) -> tuple[int, ...]:
    """An optimal strategy for each node, by back-substitution; ties go to the lowest index.

    `given`: node -> strategy of the nodes that were not eliminated.
    """
    chosen = dict(given)
    for bucket in reversed(elimination.buckets):
        total = 0.0
        for factor in bucket.factors:
            index = tuple(slice(None) if v == bucket.node else chosen[v] for v in factor.scope)
            total = total + factor.values[index]
        chosen[bucket.node] = int(np.argmin(total))
    return tuple(chosen[v] for v in range(len(chosen)))


def _weighted(cost_s: np.ndarray, memory_bytes: np.ndarray, multiplier: float) -> np.ndarray:
    return cost_s + multiplier * memory_bytes if multiplier else cost_s
