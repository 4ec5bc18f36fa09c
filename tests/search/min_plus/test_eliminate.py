import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.min_plus.eliminate import Limits, argmin, eliminate, elimination_order
from autopar.search.min_plus.min_marginals import min_marginals
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of
from tests.search.tables import block_table, every_choice, random_table, small_tables


def order_of(table: CostTable) -> tuple[int, ...]:
    order = elimination_order(table)
    assert order is not None
    return order


@settings(max_examples=40)
@given(small_tables(limited=False), st.sampled_from([0.0, 1e-12, 1e-9]))
def test_elimination_is_brute_force(table, multiplier):
    truth = min(cost_of(table, choice) + multiplier * memory_of(table, choice) for choice in every_choice(table))
    elimination = eliminate(table, order_of(table), multiplier=multiplier)
    assert elimination.value == pytest.approx(truth, rel=1e-12)
    if np.isfinite(truth):
        choice = argmin(elimination)
        assert cost_of(table, choice) + multiplier * memory_of(table, choice) == pytest.approx(truth, rel=1e-12)


@settings(max_examples=15)
@given(small_tables(limited=False))
def test_any_order_gives_the_same_optimum(table):
    orders = list(itertools.permutations(range(len(table.nodes))))[:: 1 + 5 * len(table.nodes)]
    values = {eliminate(table, order).value for order in orders}
    assert max(values) == pytest.approx(min(values), rel=1e-12)


@settings(max_examples=40)
@given(small_tables(limited=False), st.sampled_from([0.0, 1e-9]))
def test_min_marginals_are_brute_force(table, multiplier):
    nodes = [np.full(node.cost_s.size, np.inf) for node in table.nodes]
    pairs = {(edge.a, edge.b): np.full(edge.cost_s.shape, np.inf) for edge in table.edges}
    for choice in every_choice(table):
        value = cost_of(table, choice) + multiplier * memory_of(table, choice)
        for v, k in enumerate(choice):
            nodes[v][k] = min(nodes[v][k], value)
        for a, b in pairs:
            index = choice[a], choice[b]
            pairs[a, b][index] = min(pairs[a, b][index], value)
    found = min_marginals(eliminate(table, order_of(table), multiplier=multiplier), frozenset(pairs))
    for v, truth in enumerate(nodes):
        np.testing.assert_allclose(found.nodes[v], truth, rtol=1e-12)
    for pair, truth in pairs.items():
        np.testing.assert_allclose(found.pairs[pair], truth, rtol=1e-12)


@pytest.mark.parametrize("num_left", [40, 80])
def test_nodes_with_one_strategy_left_do_not_make_too_many_dims(num_left):
    """A ring of them around a node that has two: a factor of as many dims as there are nodes, but of few entries."""
    hub = [Node("hub", np.array([1.0, 2.0]), np.zeros(2))]
    nodes = hub + [Node(f"n{i}", np.ones(1), np.zeros(1)) for i in range(num_left)]
    pairs = [(0, i) for i in range(1, num_left + 1)] + [
        (i, j) for i in range(1, num_left + 1) for j in range(i + 1, num_left + 1)
    ]
    edges = [Edge(a, b, np.ones((nodes[a].cost_s.size, 1)), np.zeros((nodes[a].cost_s.size, 1))) for a, b in pairs]
    table = CostTable(tuple(nodes), tuple(edges))
    order = elimination_order(table)
    assert (order is None) == (num_left > 64)
    assert order is None or eliminate(table, order).value == 1 + num_left + len(edges)


def test_a_table_too_dense_for_the_limits_has_no_order():
    dense = random_table(0, num_nodes=7, num_edges=21, sizes=(4, 4))
    assert elimination_order(dense, Limits(entries=4**5)) is None
    assert elimination_order(dense, Limits(additions=4**6)) is None
    assert elimination_order(dense, Limits(entries=4**6, additions=4**8)) is not None


def test_a_block_needs_factors_of_two_nodes_only():
    assert elimination_order(block_table(num_nodes=75, num_strategies=49), Limits(entries=49**2)) is not None
