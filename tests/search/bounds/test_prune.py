import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import InfeasibleError
from autopar.search.bounds.prune import reduce, restrict, unreduced
from autopar.search.check_table import checked
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of
from tests.search.tables import brute_force, every_choice, small_tables


@settings(max_examples=60)
@given(small_tables(limited=True))
def test_reduction_keeps_the_optimum(table):
    table = checked(table)
    truth = brute_force(table)
    try:
        reduced = reduce(unreduced(table))
    except InfeasibleError:
        assert truth is None
        return
    found = brute_force(reduced.table)
    assert (found is None) == (truth is None)
    if truth is not None:
        assert found[0] == pytest.approx(truth[0], rel=1e-12)
        assert cost_of(table, reduced.lift(found[1])) == pytest.approx(found[0], rel=1e-12)


@settings(max_examples=30)
@given(small_tables(limited=True))
def test_what_takes_the_place_of_a_dropped_strategy_is_no_worse(table):
    table = checked(table)
    try:
        reduced = reduce(unreduced(table))
    except InfeasibleError:
        return
    for choice in every_choice(table)[::7]:
        if np.isfinite(cost_of(table, choice)):
            small = reduced.lower(choice)
            assert small is not None
            assert cost_of(reduced.table, small) <= cost_of(table, choice) * (1 + 1e-12)
            assert memory_of(reduced.table, small) <= memory_of(table, choice) * (1 + 1e-12)


def test_duplicates_keep_one():
    twin = Node("twin", np.array([1.0, 1.0, 1.0]), np.array([5.0, 5.0, 5.0]))
    edge = Edge(0, 1, np.tile([0.0, 2.0, 1.0], (3, 1)), np.zeros((3, 3)))
    other = Node("other", np.zeros(3), np.array([9.0, 0.0, 5.0]))
    reduced = reduce(unreduced(CostTable((twin, other), (edge,), 100.0)))
    assert [kept.tolist() for kept in reduced.kept] == [[0], [0, 1, 2]]


def test_restricting_twice_still_leads_back():
    node = Node("a", np.arange(5.0), np.zeros(5))
    once = restrict(unreduced(CostTable((node,), ())), [np.array([1, 3, 4])])
    twice = restrict(once, [np.array([1, 2])])
    assert twice.lift((0,)) == (3,)
    assert twice.lower((4,)) == (1,)
    assert twice.lower((1,)) is None
    assert twice.lower((0,)) is None


def test_a_node_that_its_neighbours_forbid_is_named():
    blocked = Edge(0, 1, np.full((2, 2), np.inf), np.zeros((2, 2)))
    table = CostTable((Node("q_proj", np.zeros(2), np.zeros(2)), Node("k_proj", np.zeros(2), np.zeros(2))), (blocked,))
    with pytest.raises(InfeasibleError, match="'q_proj'"):
        reduce(unreduced(table))
