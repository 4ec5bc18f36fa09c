import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.chain import Chain, bound_chain, unrolled
from autopar.search.eliminate import argmin, eliminate, elimination_order
from autopar.search.table import CostTable, Edge, Node, cost_of


def random_chain(seed: int, count: int, *, most: int = 4, forbidden: float = 0.05) -> Chain:
    """A block of 3 nodes, 3 nodes outside; every kind of edge at random."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        cost = np.where(rng.random(shape) < forbidden, np.inf, rng.gamma(1.0, 1e-3, shape))
        return cost, np.where(np.isinf(cost), 0.0, rng.integers(0, 10**9, shape))

    block, outside = (tuple(Node(f"{name}{i}", *draw(rng.integers(2, most + 1))) for i in range(3)) for name in "bo")

    def edges(left, right, among, chance=0.5):
        return tuple(Edge(a, b, *draw(left[a].cost_s.size, right[b].cost_s.size)) for a, b in among if rng.random() < chance)

    every, ordered = [(a, b) for a in range(3) for b in range(3)], [(0, 1), (0, 2), (1, 2)]
    return Chain(
        count=count,
        nodes=block,
        inner=edges(block, block, ordered, 0.8),
        crossing=edges(block, block, every, 0.4),
        outside=CostTable(outside, edges(outside, outside, ordered)),
        enters=edges(outside, block, every, 0.3),
        shared=edges(outside, block, every, 0.3),
        leaves=edges(block, outside, every, 0.3),
    )


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([0.0, 1e-12]))
def test_a_chain_is_its_copies_written_out(seed, count, multiplier):
    chain = random_chain(seed, count)
    table = unrolled(chain)
    truth = eliminate(table, elimination_order(table), multiplier=multiplier)
    found = bound_chain(chain, multiplier=multiplier)
    assert found.is_exact
    assert found.value == pytest.approx(truth.value, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_with_too_little_room_it_is_a_lower_bound(seed, count):
    chain = random_chain(seed, count, forbidden=0.0)
    exact = bound_chain(chain)
    states = np.prod([chain.nodes[j].cost_s.size for j in {edge.a for edge in (*chain.crossing, *chain.leaves)}])
    found = bound_chain(chain, most_additions=float(states) ** 3)
    assert found.value <= exact.value * (1 + 1e-12)
    assert found.is_exact == (not chain.shared)


def test_copies_may_differ_where_that_is_cheaper():
    # Handing on the same strategy costs 1, switching is free: copies alternate, which one choice for all cannot.
    node = Node("x", np.zeros(2), np.zeros(2))
    chain = Chain(5, (node,), (), (Edge(0, 0, np.eye(2), np.zeros((2, 2))),), CostTable((), ()))
    assert bound_chain(chain).value == 0.0
    assert argmin(eliminate(unrolled(chain), range(5))) in [(0, 1, 0, 1, 0), (1, 0, 1, 0, 1)]
    assert cost_of(unrolled(chain), (0,) * 5) == 4.0


def test_a_thousand_times_as_many_copies_take_about_as_long():
    chain = random_chain(0, 100, most=5, forbidden=0.0)
    seconds = []
    for count in (100, 100_000):
        start = time.process_time()
        bound_chain(replace(chain, count=count))
        seconds.append(time.process_time() - start)
    assert seconds[1] < 5 * seconds[0] + 0.1


def test_too_many_states_are_refused():
    with pytest.raises(ValueError, match="states"):
        bound_chain(random_chain(1, 3), most_additions=1.0)
