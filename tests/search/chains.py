"""The truth about chains of blocks: all copies written out."""

from autopar.search.min_plus.repeat_power import Chains
from autopar.search.table import CostTable, Edge, Node


def unrolled(chains: Chains) -> CostTable:
    """Nodes outside, then chain after chain and copy after copy, each with nodes of its own."""
    nodes, edges = list(chains.outside.nodes), list(chains.outside.edges)
    for chain in chains.chains:
        start, block, last = len(nodes), len(chain.nodes), chain.count - 1
        copies = [range(start + i * block, start + (i + 1) * block) for i in range(chain.count)]
        nodes += [
            Node(f"{node.name}.{i}", node.cost_s, node.memory_bytes) for i in range(chain.count) for node in chain.nodes
        ]
        edges += [_between(e.a, copies[0][e.b], e) for e in chain.enters]
        edges += [_between(copies[last][e.a], e.b, e) for e in chain.leaves]
        for i, copy in enumerate(copies):
            edges += [_between(copy[e.a], copy[e.b], e) for e in chain.inner]
            edges += [_between(e.a, copy[e.b], e) for e in chain.shared]
            edges += [_between(copy[e.a], copies[i + 1][e.b], e) for e in chain.crossing if i < last]
    return CostTable(tuple(nodes), _one_a_pair(edges))


def _between(a: int, b: int, edge: Edge) -> Edge:
    return Edge(a, b, edge.cost_s, edge.memory_bytes) if a < b else Edge(b, a, edge.cost_s.T, edge.memory_bytes.T)


def _one_a_pair(edges: list[Edge]) -> tuple[Edge, ...]:
    found: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        other = found.get((edge.a, edge.b))
        if other is not None:
            edge = Edge(edge.a, edge.b, edge.cost_s + other.cost_s, edge.memory_bytes + other.memory_bytes)
        found[edge.a, edge.b] = edge
    return tuple(found.values())
