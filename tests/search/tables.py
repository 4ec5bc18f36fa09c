"""Small random tables and the truth about them, by trying every choice."""

import itertools

import numpy as np
from hypothesis import strategies as st

from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of


def brute_force(table: CostTable) -> tuple[float, tuple[int, ...]] | None:
    """Least cost and a choice that has it; None when no choice is within the limit."""
    found = [
        (cost_of(table, choice), choice)
        for choice in every_choice(table)
        if memory_of(table, choice) <= table.memory_limit_bytes
    ]
    best = min(found, default=(np.inf, ()))
    return best if np.isfinite(best[0]) else None


def every_choice(table: CostTable) -> list[tuple[int, ...]]:
    """All choices, forbidden ones too."""
    return list(itertools.product(*(range(node.cost_s.size) for node in table.nodes)))


def random_table(
    seed: int,
    *,
    num_nodes: int,
    num_edges: int,
    sizes: tuple[int, int] = (2, 4),
    forbidden: float = 0.1,
    scale_s: float = 1e-3,
) -> CostTable:
    """Costs with ties and many zeros, whole bytes of memory, some pairs and strategies forbidden; no limit."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(sizes[0], sizes[1] + 1, size=num_nodes)
    pairs = [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    picked = sorted(rng.choice(len(pairs), size=min(num_edges, len(pairs)), replace=False)) if pairs else []

    def draw(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        cost = np.where(rng.random(shape) < 0.3, rng.integers(0, 3, shape), rng.gamma(1.0, 1.0, shape)) * scale_s
        return np.where(rng.random(shape) < forbidden, np.inf, cost), rng.integers(0, 10**9, shape).astype(float)

    nodes = tuple(Node(f"n{v}", *draw(k)) for v, k in enumerate(counts))
    edges = tuple(Edge(*pairs[i], *draw(counts[pairs[i][0]], counts[pairs[i][1]])) for i in picked)
    return CostTable(nodes, edges)


def block_table(*, num_nodes: int, num_strategies: int, memory_limit_bytes: float = float("inf")) -> CostTable:
    """The shape of a transformer block: a chain with residual and fan-out edges, treewidth 2; costs in 1e-5 to 1e-3
    s.
    """
    rng = np.random.default_rng(0)
    k = num_strategies
    hops = [(5 * i, 5 * i + 3) for i in range(num_nodes // 5 - 1)] + [(5 * i, 5 * i + 5) for i in range(3)]
    pairs = sorted({(v, v + 1) for v in range(num_nodes - 1)} | set(hops))
    nodes = tuple(
        Node(f"n{v}", rng.gamma(1.0, 1e-4, k) * (rng.random() < 0.4), rng.gamma(1.0, 1e8, k) * (rng.random() < 0.4))
        for v in range(num_nodes)
    )
    edges = tuple(
        Edge(a, b, rng.gamma(0.5, 2e-4, (k, k)) * (rng.random((k, k)) < 0.9), rng.gamma(1.0, 1e7, (k, k)))
        for a, b in pairs
    )
    return CostTable(nodes, edges, memory_limit_bytes)


@st.composite
def small_tables(draw: st.DrawFn, *, limited: bool) -> CostTable:
    """3 to 6 nodes of 2 to 4 strategies; `limited`: a memory limit somewhere between the least and the most that any
    choice takes.
    """
    num_nodes = draw(st.integers(3, 6))
    seed, num_edges = draw(st.integers(0, 10**6)), draw(st.integers(0, 2 * num_nodes))
    scale_s = draw(st.sampled_from([1e-6, 1e-3, 10.0]))
    table = random_table(
        seed,
        num_nodes=num_nodes,
        num_edges=num_edges,
        forbidden=draw(st.sampled_from([0.0, 0.1, 0.3])),
        scale_s=scale_s,
    )
    if not limited:
        return table
    memory = [memory_of(table, choice) for choice in every_choice(table)]
    limit = float(np.quantile(memory, draw(st.floats(0.0, 1.0)), method="lower"))
    return CostTable(table.nodes, table.edges, limit)
