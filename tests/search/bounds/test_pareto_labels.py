import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.bounds.close_gap import close
from autopar.search.bounds.pareto_labels import eliminate_labels
from autopar.search.bounds.prune import unreduced
from autopar.search.check_table import checked
from autopar.search.deadline import NEVER, Deadline
from autopar.search.min_plus.eliminate import eliminate, elimination_order
from autopar.search.search_state import State, is_solved
from autopar.search.table import cost_of, memory_of
from tests.search.tables import brute_force, every_choice, random_table, small_tables


@settings(max_examples=150)
@given(small_tables(limited=True), st.sampled_from([0.0, 1e-12, 1e-10]), st.sampled_from([0.9, 1.0, 1.1, 3.0]))
def test_without_rounding_labels_are_brute_force(table, price, part):
    table = checked(table)
    truth = brute_force(table)
    if truth is None or truth[0] == 0.0:
        return
    elimination = eliminate(table, elimination_order(table), multiplier=price)
    front = eliminate_labels(table, elimination, price, part * truth[0])
    if part <= 1.0:
        assert front.choice is None or cost_of(table, front.choice) == pytest.approx(truth[0], rel=1e-12)
        assert front.bound_s <= part * truth[0]
        return
    assert cost_of(table, front.choice) == pytest.approx(truth[0], rel=1e-12) == front.bound_s
    assert memory_of(table, front.choice) <= table.memory_limit_bytes


@settings(max_examples=60)
@given(small_tables(limited=True), st.integers(1, 3))
def test_rounded_labels_are_bounds_and_their_choice_is_within_the_limit(table, most_labels):
    table = checked(table)
    truth = brute_force(table)
    if truth is None or truth[0] == 0.0:
        return
    front = eliminate_labels(
        table, eliminate(table, elimination_order(table)), 0.0, 2.0 * truth[0], most_labels=most_labels
    )
    assert front.bound_s <= truth[0] * (1 + 1e-12)
    assert memory_of(table, front.choice) <= table.memory_limit_bytes
    assert truth[0] * (1 - 1e-12) <= cost_of(table, front.choice)


@settings(max_examples=60)
@given(small_tables(limited=True))
def test_closing_alone_is_brute_force(table):
    table = checked(table)
    within = [
        c
        for c in every_choice(table)
        if memory_of(table, c) <= table.memory_limit_bytes and np.isfinite(cost_of(table, c))
    ]
    if not within:
        return
    worst = max(within, key=lambda choice: cost_of(table, choice))
    *_, last = close(State(unreduced(table), worst, 0.0), NEVER)
    assert is_solved(last)
    assert cost_of(table, last.best) == pytest.approx(min(cost_of(table, c) for c in within), rel=1e-9)


def test_no_time_is_no_answer():
    table = checked(random_table(0, num_nodes=4, num_edges=4))
    elimination = eliminate(table, elimination_order(table))
    assert eliminate_labels(table, elimination, 0.0, 1.0, deadline=Deadline.after(0.0)) is None
