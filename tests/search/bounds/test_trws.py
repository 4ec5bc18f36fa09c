from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.bounds.edge_classes import compacted
from autopar.search.bounds.trws import pass_messages
from autopar.search.check_table import checked
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of
from tests.search.tables import every_choice, random_table, small_tables


@settings(max_examples=150)
@given(small_tables(limited=False), st.sampled_from([0.0, 1e-12, 1e-9]), st.integers(1, 30), st.booleans())
def test_no_choice_is_below_the_bound_or_its_strategies_marginals(table, multiplier, most_sweeps, has_ceiling):
    table = checked(table)
    values = {choice: cost_of(table, choice) + multiplier * memory_of(table, choice) for choice in every_choice(table)}
    ceiling = (
        float(np.median([value for value in values.values() if np.isfinite(value)] or [np.inf]))
        if has_ceiling
        else np.inf
    )
    passed = pass_messages(table, multiplier=multiplier, ceiling=ceiling, most_sweeps=most_sweeps)
    within = {choice: value for choice, value in values.items() if value <= ceiling and np.isfinite(value)}
    for choice, value in within.items():
        assert passed.value <= value
        assert all(marginals[k] <= value for marginals, k in zip(passed.marginals, choice))
    assert set(passed.met) <= set(values)
    assert [values[choice] for choice in passed.met] == sorted(values[choice] for choice in passed.met)


@settings(max_examples=100)
@given(
    small_tables(limited=False),
    st.lists(st.sampled_from([0.0, 1e-12, 1e-9, 1e-6]), min_size=2, max_size=4),
    st.integers(1, 9),
)
def test_messages_of_other_prices_bound_this_one(table, prices, most_sweeps):
    table, passed = checked(table), None
    for price in prices:
        passed = pass_messages(table, multiplier=price, most_sweeps=most_sweeps, before=passed)
        for choice in every_choice(table):
            value = cost_of(table, choice) + price * memory_of(table, choice)
            assert passed.value <= value * (1 + 1e-14)
            assert all(marginals[k] <= value * (1 + 1e-14) for marginals, k in zip(passed.marginals, choice))


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.booleans())
def test_on_a_tree_the_bound_is_the_optimum(seed, is_star):
    whole = checked(random_table(seed, num_nodes=6, num_edges=15, forbidden=0.0))
    table = replace(
        whole, edges=tuple(edge for edge in whole.edges if (edge.a == 0 if is_star else edge.b == edge.a + 1))
    )
    truth = min(cost_of(table, choice) for choice in every_choice(table))
    passed = pass_messages(table, most_sweeps=100)
    assert passed.value == pytest.approx(truth, rel=1e-9, abs=1e-15)
    assert cost_of(table, passed.met[0]) == pytest.approx(truth, rel=1e-9, abs=1e-15)


def test_a_known_optimum_ends_the_passing_early_and_cuts_what_is_worse():
    table = checked(random_table(5, num_nodes=6, num_edges=5, forbidden=0.0))
    best = min(every_choice(table), key=lambda choice: cost_of(table, choice))
    passed = pass_messages(table, known=[best], ceiling=cost_of(table, best))
    assert passed.met[0] == best
    assert passed.value <= cost_of(table, best)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5))
def test_compact_edges_are_the_edges(seed, rows, columns):
    rng = np.random.default_rng(seed)
    of_a, of_b = rng.integers(0, rows, 9), rng.integers(0, columns, 7)
    cost = rng.integers(0, 3, (rows, columns)).astype(float)[np.ix_(of_a, of_b)]
    memory = rng.integers(0, 2, (rows, columns)).astype(float)[np.ix_(of_a, of_b)]
    nodes = (
        Node("a", np.zeros(9), np.zeros(9)),
        Node("b", np.zeros(7), np.zeros(7)),
        Node("c", np.zeros(7), np.zeros(7)),
    )
    first, second = compacted(CostTable(nodes, (Edge(0, 1, cost, memory), Edge(0, 2, cost, memory))))
    assert first.cost_s is second.cost_s
    np.testing.assert_array_equal(first.cost_s[np.ix_(first.of_a.index, first.of_b.index)], cost)
    np.testing.assert_array_equal(first.memory_bytes[np.ix_(first.of_a.index, first.of_b.index)], memory)
    assert first.cost_s.shape[0] <= rows
    values = rng.random(9)
    expected = [values[first.of_a.index == c].min() for c in range(first.cost_s.shape[0])]
    np.testing.assert_array_equal(first.of_a.least(values), expected)
