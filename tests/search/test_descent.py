import itertools

import numpy as np
from hypothesis import given, settings

from autopar.search.check import checked
from autopar.search.descent import descend, landscape, own_starts
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of
from tests.search.tables import small_tables


def rank(table, choice):
    return max(0.0, memory_of(table, choice) - table.memory_limit_bytes), cost_of(table, choice)


@settings(max_examples=40, deadline=None)
@given(small_tables(limited=True))
def test_no_move_of_one_or_two_neighbours_improves_the_end(table):
    table = checked(table)
    land = landscape(table)
    for start in own_starts(land):
        end = descend(land, start)
        if np.isinf(cost_of(table, end)):
            continue  # the walls around what is forbidden rank such choices, not their infinite costs
        excess, cost_s = rank(table, end)
        for group in land.groups:
            for strategies in itertools.product(*(range(table.nodes[v].cost_s.size) for v in group)):
                moved = list(end)
                for v, k in zip(group, strategies):
                    moved[v] = k
                other_excess, other_cost_s = rank(table, tuple(moved))
                assert np.isinf(other_cost_s) or (excess, cost_s * (1 - 1e-9)) <= (other_excess + 1e-3, other_cost_s)


@settings(max_examples=40, deadline=None)
@given(small_tables(limited=True))
def test_descent_never_ends_worse_than_an_allowed_start(table):
    table = checked(table)
    land = landscape(table)
    for start in (tuple(0 for _ in table.nodes), tuple(node.cost_s.size - 1 for node in table.nodes)):
        if np.isfinite(cost_of(table, start)):
            end = descend(land, start)
            assert rank(table, end) <= rank(table, start)
            assert descend(land, end) == end


def test_two_neighbours_move_together():
    # Each alone is stuck at (0, 0): only the joint move to (1, 1) helps.
    joint = np.array([[1.0, 9.0], [9.0, 0.5]])
    table = CostTable((Node("a", np.zeros(2), np.zeros(2)), Node("b", np.zeros(2), np.zeros(2))), (Edge(0, 1, joint, np.zeros((2, 2))),))
    assert descend(landscape(table), (0, 0)) == (1, 1)


def test_a_start_above_the_limit_sheds_memory_first():
    table = CostTable((Node("a", np.array([1.0, 2.0, 5.0]), np.array([30.0, 20.0, 10.0])),) * 2, (), 40.0)
    assert descend(landscape(table), (0, 0)) == (2, 0)
