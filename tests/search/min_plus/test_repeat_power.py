import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.min_plus.eliminate import argmin, eliminate, elimination_order
from autopar.search.min_plus.repeat_power import Chain, Chains, condensed
from autopar.search.table import CostTable, Edge, Node, cost_of
from tests.search.chains import unrolled


def random_chains(seed: int, *counts: int, most: int = 4, forbidden: float = 0.05) -> Chains:
    """3 nodes outside, and a chain of blocks of 3 nodes for each count; every kind of edge at random."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        cost = np.where(rng.random(shape) < forbidden, np.inf, rng.gamma(1.0, 1e-3, shape))
        return cost, np.where(np.isinf(cost), 0.0, rng.integers(0, 10**9, shape))

    def three(name: str) -> tuple[Node, ...]:
        return tuple(Node(f"{name}{i}", *draw(rng.integers(2, most + 1))) for i in range(3))

    def edges(left, right, among, chance=0.5):
        return tuple(
            Edge(a, b, *draw(left[a].cost_s.size, right[b].cost_s.size)) for a, b in among if rng.random() < chance
        )

    every, ordered = [(a, b) for a in range(3) for b in range(3)], [(0, 1), (0, 2), (1, 2)]
    outside = three("o")
    chains = []
    for number, count in enumerate(counts):
        block = three(f"b{number}.")
        chain = Chain(
            count=count,
            nodes=block,
            inner=edges(block, block, ordered, 0.8),
            crossing=edges(block, block, every, 0.4),
            enters=edges(outside, block, every, 0.3),
            shared=edges(outside, block, every, 0.3),
            leaves=edges(block, outside, every, 0.3),
        )
        chains.append(chain)
    return Chains(CostTable(outside, edges(outside, outside, ordered)), tuple(chains))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 6), min_size=1, max_size=2), st.booleans())
def test_condensed_chains_cost_no_more_and_where_nothing_is_shared_as_much(seed, counts, is_shared):
    chains = random_chains(seed, *counts)
    alone = (replace(c, shared=c.shared if is_shared else (), **_handing_on_node_0(c)) for c in chains.chains)
    chains = replace(chains, chains=tuple(alone))
    table = condensed(chains)
    found, truth = (eliminate(t, elimination_order(t)).value for t in (table, unrolled(chains)))
    assert found <= truth * (1 + 1e-12)
    assert is_shared or found == pytest.approx(truth, rel=1e-12)


def _handing_on_node_0(chain: Chain) -> dict[str, tuple[Edge, ...]]:
    """Crossing and leaving edges, one of them at least."""
    size = chain.nodes[0].cost_s.size
    crossing = tuple(edge for edge in chain.crossing if edge.a == 0) or (
        Edge(0, 0, np.eye(size), np.zeros((size, size))),
    )
    return {"crossing": crossing, "leaves": tuple(edge for edge in chain.leaves if edge.a == 0)}


def test_copies_may_differ_where_that_is_cheaper():
    # Handing on the same strategy costs 1, switching is free: copies alternate, which one choice for all cannot.
    node = Node("x", np.zeros(2), np.zeros(2))
    chain = Chains(CostTable((), ()), (Chain(5, (node,), (), (Edge(0, 0, np.eye(2), np.zeros((2, 2))),)),))
    table = condensed(Chains(chain.outside, tuple(replace(c, leaves=()) for c in chain.chains)))
    assert eliminate(table, elimination_order(table)).value == 0.0
    assert argmin(eliminate(unrolled(chain), range(5))) in [(0, 1, 0, 1, 0), (1, 0, 1, 0, 1)]
    assert cost_of(unrolled(chain), (0,) * 5) == 4.0


def test_a_thousand_times_as_many_copies_take_about_as_long():
    (chain,), outside = (chains := random_chains(0, 100, most=5, forbidden=0.0)).chains, chains.outside
    seconds = []
    for count in (100, 100_000):
        start = time.process_time()
        condensed(Chains(outside, (replace(chain, count=count, **_handing_on_node_0(chain)),)))
        seconds.append(time.process_time() - start)
    assert seconds[1] < 5 * seconds[0] + 0.1


def test_copies_that_hand_on_several_nodes_are_refused():
    with pytest.raises(ValueError, match="hand on"):
        condensed(random_chains(1, 3, forbidden=0.0))
