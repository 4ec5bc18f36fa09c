from dataclasses import replace

import numpy as np
import pytest

from autopar.search.check_table import checked
from autopar.search.table import CostTable, Edge, Node

NODES = (Node("a", np.zeros(2), np.zeros(2)), Node("b", np.zeros(3), np.zeros(3)))
PAIR = CostTable(NODES, (Edge(0, 1, np.zeros((2, 3)), np.zeros((2, 3))),))


def test_infinite_memory_forbids_as_infinite_cost_does():
    node = Node("a", np.array([1.0, np.inf, 2.0]), np.array([5.0, 7.0, np.inf]))
    (found,) = checked(CostTable((node,), ())).nodes
    np.testing.assert_array_equal(found.cost_s, [1.0, np.inf, np.inf])
    np.testing.assert_array_equal(found.memory_bytes, [5.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ((Edge(1, 0, np.zeros((3, 2)), np.zeros((3, 2))),), "0 <= a < b < 2"),
        ((Edge(0, 2, np.zeros((2, 3)), np.zeros((2, 3))),), "0 <= a < b < 2"),
        ((Edge(0, 1, np.zeros((3, 2)), np.zeros((3, 2))),), r"shape \(2, 3\), found \(3, 2\)"),
        ((Edge(0, 1, np.zeros((2, 3)), np.zeros((3, 2))),), "one shape"),
        (PAIR.edges * 2, "at most one edge a pair, found 2"),
        ((Edge(0, 1, np.full((2, 3), np.nan), np.zeros((2, 3))),), "found nan or -inf"),
    ],
)
def test_malformed_edges_are_named(edges, message):
    with pytest.raises(ValueError, match=message):
        checked(replace(PAIR, edges=edges))


def test_a_node_without_strategies_is_named():
    with pytest.raises(ValueError, match="node 'empty': expected one cost a strategy and at least one"):
        checked(CostTable((Node("empty", np.zeros(0), np.zeros(0)),), ()))
