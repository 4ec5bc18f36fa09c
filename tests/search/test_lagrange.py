import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.check import checked
from autopar.search.eliminate import elimination_order
from autopar.search.lagrange import by_elimination, by_messages, least_memory, maximise
from autopar.search.table import CostTable, Node, cost_of, memory_of
from tests.search.tables import brute_force, every_choice, small_tables


@settings(max_examples=60, deadline=None)
@given(small_tables(limited=True), st.integers(1, 4) | st.just(40))
def test_the_bound_is_below_every_choice_within_the_limit(table, most_steps):
    table = checked(table)
    truth = brute_force(table)
    if truth is None:
        return
    for evaluate in (by_elimination(elimination_order(table)), by_messages(truth[1]), by_messages(None)):
        dual = maximise(table, evaluate, feasible=truth[1], most_steps=most_steps)
        assert dual.bound_s <= truth[0] * (1 + 1e-14)


@settings(max_examples=30, deadline=None)
@given(small_tables(limited=True))
def test_no_price_on_a_grid_beats_the_one_found(table):
    table = checked(table)
    truth = brute_force(table)
    if truth is None:
        return
    choices = np.array([(cost_of(table, c), memory_of(table, c)) for c in every_choice(table) if np.isfinite(cost_of(table, c))])
    prices = [0.0, *np.geomspace(1e-16, 1e-6, 60)]
    grid = max((choices[:, 0] + price * (choices[:, 1] - table.memory_limit_bytes)).min() for price in prices)
    dual = maximise(table, by_elimination(elimination_order(table)), feasible=truth[1])
    assert dual.is_best
    assert dual.bound_s >= grid - 1e-9 * abs(grid)


@settings(max_examples=30, deadline=None)
@given(small_tables(limited=False))
def test_least_memory_is_brute_force(table):
    table = checked(table)
    truth = min((memory_of(table, c) for c in every_choice(table) if np.isfinite(cost_of(table, c))), default=np.inf)
    least, choice = least_memory(table, elimination_order(table))
    assert least == truth
    if np.isfinite(least):
        assert memory_of(table, choice) == least


def test_a_terabyte_that_no_choice_can_avoid_does_not_drown_microseconds():
    fixed = Node("weights", np.zeros(1), np.array([1e12]))
    free = Node("x", np.array([1e-6, 2e-6, 5e-6]), np.array([30.0, 20.0, 10.0]))
    table = CostTable((fixed, free, free), (), 1e12 + 40)
    dual = maximise(table, by_elimination(elimination_order(table)), feasible=(0, 2, 2))
    assert dual.bound_s == pytest.approx(4e-6, rel=1e-9)
    assert dual.bound_s <= 4e-6
