"""The optimum of rows of L equal blocks, each block with choices of its own, in time that grows with log L.

A block is eliminated down to a matrix "what the block before it hands on" x "what it hands on", and the min-plus power of that matrix by
squaring is L - 1 blocks. Nodes outside that every block reads are kept beside, one matrix for each of their strategies.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.factors import Factor, contract, minimise_out
from autopar.search.table import CostTable, Edge, Node

# Additions of one product of the matrices, about a second.
_MOST_ADDITIONS = 1e9


@dataclass(frozen=True)
class Chain:
    """`count` copies of a block of nodes between nodes that do not repeat, those outside.

    In each group of edges `a` and `b` number the nodes at the two ends, of the block or of those outside; there is no order among them.
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


@dataclass(frozen=True)
class ChainBound:
    """No choice has a lower objective than `value`; if `is_exact`, one has that."""

    value: float
    is_exact: bool


def bound_chains(chains: Chains, *, multiplier: float = 0.0, most_additions: float = _MOST_ADDITIONS) -> ChainBound:
    """The least cost + multiplier * memory (seconds, and seconds a byte) of all copies and the nodes outside.

    Of the nodes that all copies read, those for which `most_additions` a product do not suffice are chosen anew at each reading, which
    costs no more.
    Raises `ValueError` when what one copy hands to the next has too many states for that.
    """
    total, is_exact = _of_outside(chains.outside, multiplier), True
    for terms in _all_terms(chains, multiplier):
        beside = _beside(terms, most_additions)
        total += _copies(terms, beside)
        is_exact = is_exact and len(beside) == len(terms.read_by_all)
    return ChainBound(float(contract(total, ()).values), is_exact)


def condensed(chains: Chains) -> CostTable:
    """A table without memory whose optimum is no more than the least cost of the chains: of each, the first copy and one more node.

    That node is what the last copy hands on, and its edge to what the first does is a min-plus power. In the copies after the first, what
    all copies read is chosen anew at each reading. ValueError unless each copy hands on one node.
    """
    nodes, placed = list(chains.outside.nodes), [(edge.a, edge.b, edge) for edge in chains.outside.edges]
    for chain in chains.chains:
        terms = _Terms(chain, len(nodes), chains.outside, 0.0)
        if len(terms.handed_on) != 1:
            raise ValueError(f"a chain whose copies hand on {len(terms.handed_on)} nodes cannot be condensed: expected one")
        (first,), last = (terms.number(0, j) for j in terms.handed_on), terms.number(1, 0)
        handed_on = chain.nodes[terms.handed_on[0]]
        nodes += [*chain.nodes, Node(f"last {handed_on.name}", np.zeros(handed_on.cost_s.size), np.zeros(handed_on.cost_s.size))]
        placed += [(edge.a, terms.number(0, edge.b), edge) for edge in (*chain.enters, *chain.shared)]
        placed += [(terms.number(0, edge.a), terms.number(0, edge.b), edge) for edge in chain.inner]
        placed += [(last, edge.b, edge) for edge in chain.leaves]
        power = _from_first_to_last(terms)
        placed.append((first, last, Edge(first, last, power, np.zeros_like(power))))
    return _without_memory(CostTable(tuple(nodes), _merged(placed)))


def _from_first_to_last(terms: "_Terms") -> np.ndarray:
    """f64[states, states]: the least cost of all copies after the first, between what the first and what the last hands on."""
    (j,) = terms.handed_on
    if terms.chain.count == 1:
        return np.where(np.eye(terms.chain.nodes[j].cost_s.size, dtype=bool), 0.0, np.inf)
    scope = terms.number(0, j), terms.number(1, j)
    step = contract(_with_scope([*terms.block(1, ()), *terms.crossing()], terms, scope), scope)
    return _power(step.values[None], terms.chain.count - 1)[0]


def _without_memory(table: CostTable) -> CostTable:
    nodes = (replace(node, memory_bytes=np.zeros_like(node.cost_s)) for node in table.nodes)
    return CostTable(tuple(nodes), tuple(replace(edge, memory_bytes=np.zeros_like(edge.cost_s)) for edge in table.edges))


def unrolled(chains: Chains) -> CostTable:
    """All copies written out: nodes outside, then chain after chain and copy after copy."""
    nodes, placed = list(chains.outside.nodes), [(edge.a, edge.b, edge) for edge in chains.outside.edges]
    for chain in chains.chains:
        terms = _Terms(chain, len(nodes), chains.outside, 0.0)
        nodes += [Node(f"{node.name}.{i}", node.cost_s, node.memory_bytes) for i in range(chain.count) for node in chain.nodes]
        last = chain.count - 1
        placed += [(edge.a, terms.number(0, edge.b), edge) for edge in chain.enters]
        placed += [(terms.number(last, edge.a), edge.b, edge) for edge in chain.leaves]
        for i in range(chain.count):
            placed += [(terms.number(i, edge.a), terms.number(i, edge.b), edge) for edge in chain.inner]
            placed += [(edge.a, terms.number(i, edge.b), edge) for edge in chain.shared]
        for i in range(last):
            placed += [(terms.number(i, edge.a), terms.number(i + 1, edge.b), edge) for edge in chain.crossing]
    return CostTable(tuple(nodes), _merged(placed))


def _all_terms(chains: Chains, multiplier: float) -> Iterator["_Terms"]:
    start = len(chains.outside.nodes)
    for chain in chains.chains:
        yield _Terms(chain, start, chains.outside, multiplier)
        start += 2 * len(chain.nodes)


def _beside(terms: "_Terms", most_additions: float) -> list[int]:
    """The nodes that all copies read for each of whose strategies there is room for a matrix, the smallest first."""
    states = math.prod(terms.chain.nodes[j].cost_s.size for j in terms.handed_on)
    if states**3 > most_additions:
        most = math.floor(most_additions ** (1 / 3))
        raise ValueError(f"a block hands on {states} states, the most are {most}; drop strategies before bounding the chain")
    sizes = [node.cost_s.size for node in terms.outside.nodes]
    beside, room = [], most_additions / states**3
    for v in sorted(terms.read_by_all, key=lambda v: (sizes[v], v)):
        if (room := room / sizes[v]) >= 1.0:
            beside.append(v)
    return sorted(beside)


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
    """A chain's terms as factors. Its copies have the numbers from `start` on, those of copy i after those of copy i - 1."""

    chain: Chain
    start: int
    outside: CostTable
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
        return self.start + copy * len(self.chain.nodes) + j

    def size(self, number: int) -> int:
        """How many strategies the node of that number has."""
        if number < self.start:
            return self.outside.nodes[number].cost_s.size
        return self.chain.nodes[(number - self.start) % len(self.chain.nodes)].cost_s.size

    def block(self, copy: int, beside: Sequence[int]) -> list[Factor]:
        """All terms of one copy but those that lead to it from the copy before, or to it alone."""
        own = [self._own(self.number(copy, j), node) for j, node in enumerate(self.chain.nodes)]
        inner = [self._pair(self.number(copy, edge.a), self.number(copy, edge.b), edge) for edge in self.chain.inner]
        read = [self._pair(edge.a, self.number(copy, edge.b), edge) for edge in self.chain.shared]
        return [*own, *inner, *(term if term.scope[0] in beside else minimise_out([term], term.scope[0]) for term in read)]

    def entering(self) -> list[Factor]:
        return [self._pair(edge.a, self.number(0, edge.b), edge) for edge in self.chain.enters]

    def crossing(self) -> list[Factor]:
        return [self._pair(self.number(0, edge.a), self.number(1, edge.b), edge) for edge in self.chain.crossing]

    def leaving(self, copy: int) -> list[Factor]:
        return [self._pair(self.number(copy, edge.a), edge.b, edge) for edge in self.chain.leaves]

    def _own(self, number: int, node: Node) -> Factor:
        return _own(number, node, self.multiplier)

    def _pair(self, a: int, b: int, edge: Edge) -> Factor:
        return _pair(a, b, edge, self.multiplier)


def _of_outside(table: CostTable, multiplier: float) -> list[Factor]:
    own = [_own(v, node, multiplier) for v, node in enumerate(table.nodes)]
    return own + [_pair(edge.a, edge.b, edge, multiplier) for edge in table.edges]


def _own(number: int, node: Node, multiplier: float) -> Factor:
    return Factor((number,), node.cost_s + multiplier * node.memory_bytes)


def _pair(a: int, b: int, edge: Edge, multiplier: float) -> Factor:
    values = edge.cost_s + multiplier * edge.memory_bytes
    return Factor((a, b), values) if a < b else Factor((b, a), values.T)


def _copies(terms: _Terms, beside: Sequence[int]) -> list[Factor]:
    """All copies as a few factors of nodes outside and of what the first and the last copy (number 1 here) hand on."""
    chain = terms.chain
    first = [*terms.block(0, beside), *terms.entering()]
    handed_on = [terms.number(0, j) for j in terms.handed_on]
    entered = {edge.a for edge in chain.enters}
    head = contract(_with_scope(first, terms, (*beside, *handed_on)), tuple(sorted({*beside, *entered, *handed_on})))
    if chain.count == 1:
        return [head, *terms.leaving(0)]
    after = [terms.number(1, j) for j in terms.handed_on]
    scope = (*beside, *handed_on, *after)
    step = contract(_with_scope([*terms.block(1, beside), *terms.crossing()], terms, scope), scope)
    states = math.prod(chain.nodes[j].cost_s.size for j in terms.handed_on)
    power = _power(step.values.reshape(-1, states, states), chain.count - 1)
    return [head, Factor(scope, power.reshape(step.values.shape)), *terms.leaving(1)]


def _with_scope(factors: Sequence[Factor], terms: _Terms, scope: Sequence[int]) -> list[Factor]:
    """The factors, and zeros for each node of the scope that none of them has."""
    present = {v for factor in factors for v in factor.scope}
    return [*factors, *(Factor((v,), np.zeros(terms.size(v))) for v in scope if v not in present)]


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
