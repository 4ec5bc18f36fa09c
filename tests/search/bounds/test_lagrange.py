import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.bounds.lagrange import Enough, around_limit, by_elimination, by_messages, least_memory, maximise
from autopar.search.check_table import checked
from autopar.search.min_plus.eliminate import elimination_order
from autopar.search.table import CostTable, Node, cost_of, memory_of
from tests.search.tables import brute_force, every_choice, small_tables


@settings(max_examples=60)
@given(small_tables(limited=True), st.integers(1, 4) | st.just(40))
def test_the_bound_is_below_every_choice_within_the_limit(table, most_steps):
    table = checked(table)
    truth = brute_force(table)
    if truth is None:
        return
    for evaluate in (by_elimination(elimination_order(table)), by_messages(truth[1]), by_messages(None)):
        dual = maximise(table, evaluate, feasible=truth[1], enough=Enough(most_steps=most_steps))
        assert dual.bound_s <= truth[0] * (1 + 1e-14)


@settings(max_examples=30)
@given(small_tables(limited=True))
def test_no_price_on_a_grid_beats_the_one_found(table):
    table = checked(table)
    truth = brute_force(table)
    if truth is None:
        return
    choices = np.array(
        [(cost_of(table, c), memory_of(table, c)) for c in every_choice(table) if np.isfinite(cost_of(table, c))]
    )
    prices = [0.0, *np.geomspace(1e-16, 1e-6, 60)]
    grid = max((choices[:, 0] + price * (choices[:, 1] - table.memory_limit_bytes)).min() for price in prices)
    dual = maximise(table, by_elimination(elimination_order(table)), feasible=truth[1])
    assert dual.is_best
    assert dual.bound_s >= grid - 1e-9 * abs(grid)


@settings(max_examples=30)
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


@settings(max_examples=60)
@given(small_tables(limited=True), st.randoms(use_true_random=False))
def test_the_two_around_the_limit_cost_the_same_at_the_best_price(table, random):
    table = checked(table)
    truth = brute_force(table)
    if truth is None:
        return
    allowed = [choice for choice in every_choice(table) if np.isfinite(cost_of(table, choice))]
    start = next(
        (
            choice
            for choice in random.sample(allowed, len(allowed))
            if memory_of(table, choice) > table.memory_limit_bytes
        ),
        None,
    )
    dual = maximise(table, by_elimination(elimination_order(table)), feasible=truth[1], above=start)
    among = around_limit(table, allowed)
    free = min(cost_of(table, choice) for choice in allowed)
    if dual.around is None:
        assert dual.price == 0.0 and dual.bound_s == pytest.approx(free, rel=1e-9)
        return
    for above, within in (dual.around, among):
        assert memory_of(table, above) > table.memory_limit_bytes >= memory_of(table, within)
        for choice in (above, within):
            value = cost_of(table, choice) + dual.price * (memory_of(table, choice) - table.memory_limit_bytes)
            assert value == pytest.approx(dual.bound_s, rel=1e-8)


@settings(max_examples=60)
@given(small_tables(limited=True), st.integers(2, 9))
def test_what_can_be_divided_costs_no_more_than_the_bound(table, copies):
    # As many independent copies of the table, some as the choice above the limit, the others as that within it.
    table = checked(table)
    truth = brute_force(table)
    if truth is None:
        return
    dual = maximise(table, by_elimination(elimination_order(table)), feasible=truth[1])
    if dual.around is None:
        return
    above, within = ((cost_of(table, end), memory_of(table, end)) for end in dual.around)
    num_above = int((table.memory_limit_bytes - within[1]) / (above[1] - within[1]) * copies)
    mixed = [num_above * a + (copies - num_above) * w for a, w in zip(above, within)]
    assert mixed[1] <= copies * table.memory_limit_bytes * (1 + 1e-12)
    unused = copies * table.memory_limit_bytes - mixed[1]
    assert mixed[0] == pytest.approx(copies * dual.bound_s + dual.price * unused, rel=1e-8)
    assert mixed[0] <= copies * truth[0] * (1 + 1e-8) + dual.price * unused
