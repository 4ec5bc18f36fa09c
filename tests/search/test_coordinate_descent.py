import itertools

import numpy as np
from hypothesis import given, settings

from autopar.search.check_table import checked
from autopar.search.coordinate_descent import descend, landscape, own_starts, shed
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of
from tests.search.tables import small_tables


def rank(table, choice):
    return max(0.0, memory_of(table, choice) - table.memory_limit_bytes), cost_of(table, choice)


@settings(max_examples=40)
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


@settings(max_examples=40)
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
    table = CostTable(
        (Node("a", np.zeros(2), np.zeros(2)), Node("b", np.zeros(2), np.zeros(2))),
        (Edge(0, 1, joint, np.zeros((2, 2))),),
    )
    assert descend(landscape(table), (0, 0)) == (1, 1)


def test_a_start_above_the_limit_sheds_memory_first():
    table = CostTable((Node("a", np.array([1.0, 2.0, 5.0]), np.array([30.0, 20.0, 10.0])),) * 2, (), 40.0)
    assert descend(landscape(table), (0, 0)) == (2, 0)


def test_memory_is_shed_where_a_byte_costs_least():
    # 10 bytes too many: the first node would save 100 at 1 s, of which 10 count; the second 10 at .2 s; the third 5 at
    # .01 s.
    table = CostTable(
        (
            Node("a", np.array([0.0, 1.0]), np.array([200.0, 100.0])),
            Node("b", np.array([0.0, 0.2]), np.array([20.0, 10.0])),
            Node("c", np.array([0.0, 0.01]), np.array([10.0, 5.0])),
        ),
        (),
        220.0,
    )
    assert shed(landscape(table), (0, 0, 0), most_moves=1) == (0, 0, 1)
    assert shed(landscape(table), (0, 0, 0), most_moves=9) == (0, 1, 1)
    assert shed(landscape(table), (1, 0, 0), most_moves=9) == (1, 0, 0)


@settings(max_examples=40)
@given(small_tables(limited=True))
def test_shedding_ends_within_the_limit_or_nearer_to_it(table):
    table = checked(table)
    start = tuple(0 for _ in table.nodes)
    if np.isfinite(cost_of(table, start)):
        assert rank(table, shed(landscape(table), start, most_moves=20))[0] <= rank(table, start)[0]
