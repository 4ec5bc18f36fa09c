import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.min_plus.sparse_core import core
from autopar.search.table import cost_of
from tests.search.tables import block_table, brute_force, every_choice, random_table, small_tables


@settings(max_examples=60)
@given(small_tables(limited=False))
def test_the_core_has_the_optimum_of_the_table(table):
    small, truth = core(table), brute_force(table)
    least = brute_force(small.table)
    assert (least is None) == (truth is None)
    if truth is not None:
        assert least[0] == pytest.approx(truth[0], rel=1e-12)
        assert cost_of(table, small.lift(least[1])) == pytest.approx(truth[0], rel=1e-12)


@settings(max_examples=30)
@given(small_tables(limited=False), st.integers(0, 10**6))
def test_every_choice_is_lifted_to_the_cheapest_that_contains_it(table, seed):
    small = core(table)
    choices = every_choice(table)
    some = choices[np.random.default_rng(seed).integers(len(choices))]
    left = small.lower(some)
    best_s = min(cost_of(table, choice) for choice in choices if small.lower(choice) == left)
    lifted = small.lift(left)
    assert cost_of(small.table, left) == pytest.approx(best_s, rel=1e-12)
    if np.isfinite(best_s):
        assert small.lower(lifted) == left
        assert cost_of(table, lifted) == pytest.approx(best_s, rel=1e-12)


def test_a_block_leaves_one_node():
    assert len(core(block_table(num_nodes=75, num_strategies=49)).table.nodes) == 1


def test_each_component_and_what_is_dense_stay():
    alone = random_table(0, num_nodes=3, num_edges=0)
    assert core(alone).nodes == (0, 1, 2)
    dense = random_table(1, num_nodes=5, num_edges=10)
    assert core(dense).nodes == tuple(range(5))
