"""The optimum of L equal blocks in a row, each with choices of its own, in time that grows with log L.

A block is eliminated down to a matrix "what the block before it hands on" x "what it hands on", and the min-plus power of that matrix by
squaring is L - 1 blocks. Nodes outside that every block reads are kept beside, one matrix for each of their strategies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.factors import Factor, contract
from autopar.search.table import CostTable, Edge, Node

# Additions of one product of the matrices, about a second.
_MOST_ADDITIONS = 1e9


@dataclass(frozen=True)
class Chain:
    """`count` copies of a block of nodes between nodes that do not repeat.

    In each group of edges `a` and `b` number the nodes at the two ends, of the block or of `outside`; there is no order among them.
    """

    count: int
    nodes: tuple[Node, ...]  # the block
    inner: tuple[Edge, ...]  # block, block: within each copy
    crossing: tuple[Edge, ...]  # block, block: from each copy to the next
    outside: CostTable  # its memory limit is not looked at
    enters: tuple[Edge, ...] = ()  # outside, block: of the first copy
    shared: tuple[Edge, ...] = ()  # outside, block: of every copy
    leaves: tuple[Edge, ...] = ()  # block, outside: of the last copy


@dataclass(frozen=True)
class ChainBound:
    """No choice has a lower objective than `value`; if `is_exact`, one has that."""

    value: float
    is_exact: bool


def bound_chain(chain: Chain, *, multiplier: float = 0.0, most_additions: float = _MOST_ADDITIONS) -> ChainBound:
    """The least cost + multiplier * memory (seconds, and seconds a byte) of all copies and the nodes outside.

    Of the nodes that all copies read, those for which `most_additions` a product do not suffice are chosen anew by each copy, which costs
    no more.
    Raises `ValueError` when what one copy hands to the next has too many states for that.
    """
    terms = _Terms(chain, multiplier)
    states = math.prod(chain.nodes[j].cost_s.size for j in terms.handed_on)
    if states**3 > most_additions:
        most = math.floor(most_additions ** (1 / 3))
        raise ValueError(f"a block hands on {states} states, the most are {most}; drop strategies before bounding the chain")
    beside, room = [], most_additions / states**3
    for v in sorted(terms.read_by_all, key=lambda v: (chain.outside.nodes[v].cost_s.size, v)):
        if (room := room / chain.outside.nodes[v].cost_s.size) >= 1.0:
            beside.append(v)
    total = [*terms.outside(), *_copies(chain, terms, sorted(beside))]
    return ChainBound(float(contract(total, ()).values), len(beside) == len(terms.read_by_all))


def unrolled(chain: Chain) -> CostTable:
    """All copies written out: nodes outside, then copy after copy."""
    terms = _Terms(chain, 0.0)
    copies = [Node(f"{node.name}.{i}", node.cost_s, node.memory_bytes) for i in range(chain.count) for node in chain.nodes]
    last = chain.count - 1
    placed = [(edge.a, edge.b, edge) for edge in chain.outside.edges]
    placed += [(edge.a, terms.number(0, edge.b), edge) for edge in chain.enters]
    placed += [(terms.number(last, edge.a), edge.b, edge) for edge in chain.leaves]
    for i in range(chain.count):
        placed += [(terms.number(i, edge.a), terms.number(i, edge.b), edge) for edge in chain.inner]
        placed += [(edge.a, terms.number(i, edge.b), edge) for edge in chain.shared]
    for i in range(last):
        placed += [(terms.number(i, edge.a), terms.number(i + 1, edge.b), edge) for edge in chain.crossing]
    return CostTable((*chain.outside.nodes, *copies), _merged(placed))


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
    """The chain's terms as factors. Nodes outside have the numbers 0, 1, ...; those of copy i follow those of copy i - 1."""

    chain: Chain
    multiplier: float

    @property
    def handed_on(self) -> tuple[int, ...]:
        """Nodes of the block that the next copy, or after the last copy something outside, reads."""
        return tuple(sorted({edge.a for edge in (*self.chain.crossing, *self.chain.leaves)}))

    @property
    def read_by_all(self) -> tuple[int, ...]:
        """Nodes outside that every copy reads."""
        return tuple(sorted({edge.a for edge in self.chain.shared}))

    def number(self, copy: int, j: int) -> int:
        return len(self.chain.outside.nodes) + copy * len(self.chain.nodes) + j

    def outside(self) -> list[Factor]:
        table = self.chain.outside
        return [*(self._own(v, node) for v, node in enumerate(table.nodes)), *(self._pair(edge.a, edge.b, edge) for edge in table.edges)]

    def block(self, copy: int) -> list[Factor]:
        """All terms of one copy but those that lead to it from the copy before, or to it alone."""
        own = [self._own(self.number(copy, j), node) for j, node in enumerate(self.chain.nodes)]
        inner = [self._pair(self.number(copy, edge.a), self.number(copy, edge.b), edge) for edge in self.chain.inner]
        return [*own, *inner, *(self._pair(edge.a, self.number(copy, edge.b), edge) for edge in self.chain.shared)]

    def entering(self) -> list[Factor]:
        return [self._pair(edge.a, self.number(0, edge.b), edge) for edge in self.chain.enters]

    def crossing(self) -> list[Factor]:
        return [self._pair(self.number(0, edge.a), self.number(1, edge.b), edge) for edge in self.chain.crossing]

    def leaving(self, copy: int) -> list[Factor]:
        return [self._pair(self.number(copy, edge.a), edge.b, edge) for edge in self.chain.leaves]

    def _own(self, number: int, node: Node) -> Factor:
        return Factor((number,), node.cost_s + self.multiplier * node.memory_bytes)

    def _pair(self, a: int, b: int, edge: Edge) -> Factor:
        values = edge.cost_s + self.multiplier * edge.memory_bytes
        return Factor((a, b), values) if a < b else Factor((b, a), values.T)


def _copies(chain: Chain, terms: _Terms, beside: Sequence[int]) -> list[Factor]:
    """All copies as a few factors of nodes outside and of what the first and the last copy (number 1 here) hand on."""
    loose = set(terms.read_by_all) - set(beside)
    # A node that each copy chooses anew is one of the block: it gets a number of its own.
    fresh = {v: -1 - v for v in loose}
    first = [*_renamed(terms.block(0), fresh), *terms.entering()]
    handed_on = [terms.number(0, j) for j in terms.handed_on]
    entered = {edge.a for edge in chain.enters}
    head = contract(_with_scope(first, chain, (*beside, *handed_on)), tuple(sorted({*beside, *entered, *handed_on})))
    if chain.count == 1:
        return [head, *terms.leaving(0)]
    after = [terms.number(1, j) for j in terms.handed_on]
    scope = (*beside, *handed_on, *after)
    step = contract(_with_scope([*_renamed(terms.block(1), fresh), *terms.crossing()], chain, scope), scope)
    states = math.prod(chain.nodes[j].cost_s.size for j in terms.handed_on)
    power = _power(step.values.reshape(-1, states, states), chain.count - 1)
    return [head, Factor(scope, power.reshape(step.values.shape)), *terms.leaving(1)]


def _renamed(factors: Sequence[Factor], names: Mapping[int, int]) -> list[Factor]:
    """The same terms of other nodes; a new name is below all others, so that it stays in front."""
    return [Factor(tuple(names.get(v, v) for v in factor.scope), factor.values) for factor in factors]


def _with_scope(factors: Sequence[Factor], chain: Chain, scope: Sequence[int]) -> list[Factor]:
    """The factors, and zeros for each node of the scope that none of them has."""
    present = {v for factor in factors for v in factor.scope}
    num_outside = len(chain.outside.nodes)
    absent = [v for v in scope if v not in present]
    sizes = [(chain.outside.nodes[v] if v < num_outside else chain.nodes[(v - num_outside) % len(chain.nodes)]).cost_s.size for v in absent]
    return [*factors, *(Factor((v,), np.zeros(size)) for v, size in zip(absent, sizes))]


def _power(matrices: np.ndarray, exponent: int) -> np.ndarray:
    """Min-plus power of each matrix, f64[B, n, n]; exponent at least 1."""
    result = None
    while exponent:
        if exponent & 1:
            result = matrices if result is None else _product(result, matrices)
        exponent >>= 1
        if exponent:
            matrices = _product(matrices, matrices)
    return result


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    best = np.full(left.shape, np.inf)
    for k in range(left.shape[2]):
        np.minimum(best, left[:, :, k, None] + right[:, None, k, :], out=best)
    return best
