import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.chain import Chain, Chains, bound_chains, condensed, unrolled
from autopar.search.eliminate import argmin, eliminate, elimination_order
from autopar.search.table import CostTable, Edge, Node, cost_of


def random_chains(seed: int, *counts: int, most: int = 4, forbidden: float = 0.05) -> Chains:
    """3 nodes outside, and a chain of blocks of 3 nodes for each count; every kind of edge at random."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        cost = np.where(rng.random(shape) < forbidden, np.inf, rng.gamma(1.0, 1e-3, shape))
        return cost, np.where(np.isinf(cost), 0.0, rng.integers(0, 10**9, shape))

    def three(name: str) -> tuple[Node, ...]:
        return tuple(Node(f"{name}{i}", *draw(rng.integers(2, most + 1))) for i in range(3))

    def edges(left, right, among, chance=0.5):
        return tuple(Edge(a, b, *draw(left[a].cost_s.size, right[b].cost_s.size)) for a, b in among if rng.random() < chance)

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


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 8), max_size=2), st.sampled_from([0.0, 1e-12]))
def test_chains_are_their_copies_written_out(seed, counts, multiplier):
    chain = random_chains(seed, *counts)
    table = unrolled(chain)
    truth = eliminate(table, elimination_order(table), multiplier=multiplier)
    found = bound_chains(chain, multiplier=multiplier)
    assert found.is_exact
    assert found.value == pytest.approx(truth.value, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_with_too_little_room_it_is_a_lower_bound(seed, count):
    chains = random_chains(seed, count, forbidden=0.0)
    exact = bound_chains(chains)
    (chain,) = chains.chains
    states = np.prod([chain.nodes[j].cost_s.size for j in {edge.a for edge in (*chain.crossing, *chain.leaves)}])
    found = bound_chains(chains, most_additions=float(states) ** 3)
    assert found.value <= exact.value * (1 + 1e-12)
    assert found.is_exact == (not chain.shared)


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
    crossing = tuple(edge for edge in chain.crossing if edge.a == 0) or (Edge(0, 0, np.eye(size), np.zeros((size, size))),)
    return {"crossing": crossing, "leaves": tuple(edge for edge in chain.leaves if edge.a == 0)}


def test_copies_may_differ_where_that_is_cheaper():
    # Handing on the same strategy costs 1, switching is free: copies alternate, which one choice for all cannot.
    node = Node("x", np.zeros(2), np.zeros(2))
    chain = Chains(CostTable((), ()), (Chain(5, (node,), (), (Edge(0, 0, np.eye(2), np.zeros((2, 2))),)),))
    assert bound_chains(chain).value == 0.0
    assert argmin(eliminate(unrolled(chain), range(5))) in [(0, 1, 0, 1, 0), (1, 0, 1, 0, 1)]
    assert cost_of(unrolled(chain), (0,) * 5) == 4.0


def test_a_thousand_times_as_many_copies_take_about_as_long():
    (chain,), outside = (chains := random_chains(0, 100, most=5, forbidden=0.0)).chains, chains.outside
    seconds = []
    for count in (100, 100_000):
        start = time.process_time()
        bound_chains(Chains(outside, (replace(chain, count=count),)))
        seconds.append(time.process_time() - start)
    assert seconds[1] < 5 * seconds[0] + 0.1


def test_too_many_states_are_refused():
    with pytest.raises(ValueError, match="states"):
        bound_chains(random_chains(1, 3), most_additions=1.0)
