"""Rows of L equal blocks, each block with choices of its own, as a table of two blocks, in time that grows with log L.

A block is eliminated down to a matrix "what the block before it hands on" x "what it hands on", and the min-plus power
of that matrix by squaring is L - 1 blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.min_plus.factors import Factor, contract, minimise_out
from autopar.search.table import CostTable, Edge, Node


@dataclass(frozen=True)
class Chain:
    """`count` copies of a block of nodes between nodes that do not repeat, those outside.

    In each group of edges `a` and `b` number the nodes at the two ends, of the block or of those outside; there is no
    order among them.
    """

    count: int
    nodes: tuple[Node, ...]  # the block
    inner: tuple[Edge, ...]  # block, block: within each copy
    crossing: tuple[Edge, ...]  # block, block: from each copy to the next
    enters: tuple[Edge, ...] = ()  # outside, block: of the first copy
    shared: tuple[Edge, ...] = ()  # outside, block: of every copy
    leaves: tuple[Edge, ...] = ()  # block, outside: of the last copy


@dataclass(frozen=True)
class Chains:
    """Chains that meet only in the nodes of `outside`, whose memory limit is not looked at."""

    outside: CostTable
    chains: tuple[Chain, ...]


def condensed(chains: Chains) -> CostTable:
    """A table without memory whose optimum is no more than the least cost of the chains: of each, the first copy and
    one more node.

    That node is what the last copy hands on, and its edge to what the first does is a min-plus power. In the copies
    after the first, what all copies read is chosen anew at each reading. ValueError unless each copy hands on one node.
    """
    nodes, placed = list(chains.outside.nodes), [(edge.a, edge.b, edge) for edge in chains.outside.edges]
    for chain in chains.chains:
        terms = _Terms(chain, len(nodes))
        if len(terms.handed_on) != 1:
            raise ValueError(
                f"a chain whose copies hand on {len(terms.handed_on)} nodes cannot be condensed: expected one"
            )
        (first,), last = (terms.number(0, j) for j in terms.handed_on), terms.number(1, 0)
        handed_on = chain.nodes[terms.handed_on[0]]
        nodes += [
            *chain.nodes,
            Node(f"last {handed_on.name}", np.zeros(handed_on.cost_s.size), np.zeros(handed_on.cost_s.size)),
        ]
        placed += [(edge.a, terms.number(0, edge.b), edge) for edge in (*chain.enters, *chain.shared)]
        placed += [(terms.number(0, edge.a), terms.number(0, edge.b), edge) for edge in chain.inner]
        placed += [(last, edge.b, edge) for edge in chain.leaves]
        power = _from_first_to_last(terms)
        placed.append((first, last, Edge(first, last, power, np.zeros_like(power))))
    return _without_memory(CostTable(tuple(nodes), _merged(placed)))


def _from_first_to_last(terms: "_Terms") -> np.ndarray:
    """f64[states, states]: the least cost of all copies after the first, between what the first and what the last hands
    on.
    """
    (j,) = terms.handed_on
    if terms.chain.count == 1:
        return np.where(np.eye(terms.chain.nodes[j].cost_s.size, dtype=bool), 0.0, np.inf)
    scope = terms.number(0, j), terms.number(1, j)
    size = terms.chain.nodes[j].cost_s.size
    none = (Factor((v,), np.zeros(size)) for v in scope)  # the block's terms need not have both
    step = contract([*none, *terms.block(1), *terms.crossing()], scope)
    return _power(step.values, terms.chain.count - 1)


def _without_memory(table: CostTable) -> CostTable:
    nodes = (replace(node, memory_bytes=np.zeros_like(node.cost_s)) for node in table.nodes)
    return CostTable(
        tuple(nodes), tuple(replace(edge, memory_bytes=np.zeros_like(edge.cost_s)) for edge in table.edges)
    )


def _merged(placed: Sequence[tuple[int, int, Edge]]) -> tuple[Edge, ...]:
    """One edge a pair of nodes, lower node first."""
    edges: dict[tuple[int, int], Edge] = {}
    for a, b, edge in placed:
        cost, memory = (edge.cost_s, edge.memory_bytes) if a < b else (edge.cost_s.T, edge.memory_bytes.T)
        pair = min(a, b), max(a, b)
        if pair in edges:
            cost, memory = cost + edges[pair].cost_s, memory + edges[pair].memory_bytes
        edges[pair] = Edge(*pair, cost, memory)
    return tuple(edges.values())


@dataclass(frozen=True)
class _Terms:
    """A chain's terms as factors. Its copies have the numbers from `start` on, those of copy i after those of copy i -
    1.
    """

    chain: Chain
    start: int

    @property
    def handed_on(self) -> tuple[int, ...]:
        """Nodes of the block that the next copy, or after the last copy something outside, reads."""
        return tuple(sorted({edge.a for edge in (*self.chain.crossing, *self.chain.leaves)}))

    def number(self, copy: int, j: int) -> int:
        return self.start + copy * len(self.chain.nodes) + j

    def block(self, copy: int) -> list[Factor]:
        """All terms of one copy but those that lead to it from the copy before, or to it alone."""
        own = [Factor((self.number(copy, j),), node.cost_s) for j, node in enumerate(self.chain.nodes)]
        inner = [_pair(self.number(copy, edge.a), self.number(copy, edge.b), edge) for edge in self.chain.inner]
        read = [minimise_out([_pair(edge.a, self.number(copy, edge.b), edge)], edge.a) for edge in self.chain.shared]
        return [*own, *inner, *read]

    def crossing(self) -> list[Factor]:
        return [_pair(self.number(0, edge.a), self.number(1, edge.b), edge) for edge in self.chain.crossing]


def _pair(a: int, b: int, edge: Edge) -> Factor:
    return Factor((a, b), edge.cost_s) if a < b else Factor((b, a), edge.cost_s.T)


def _power(matrix: np.ndarray, exponent: int) -> np.ndarray:
    """Min-plus power of a square matrix; exponent at least 1."""
    result = None
    while exponent:
        if exponent & 1:
            result = matrix if result is None else _product(result, matrix)
        exponent >>= 1
        if exponent:
            matrix = _product(matrix, matrix)
    return result


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    best = np.full(left.shape, np.inf)
    for k in range(left.shape[1]):
        np.minimum(best, left[:, k, None] + right[None, k, :], out=best)
    return best
