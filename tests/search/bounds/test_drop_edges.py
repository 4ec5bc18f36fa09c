import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.bounds.drop_edges import tractable
from autopar.search.check_table import checked
from autopar.search.min_plus.eliminate import Limits
from autopar.search.table import cost_of, memory_of
from tests.search.tables import every_choice, random_table, small_tables


@settings(max_examples=30)
@given(small_tables(limited=False), st.sampled_from([4, 16, 64]))
def test_a_relaxed_table_costs_and_takes_no_more(table, entries):
    table = checked(table)
    relaxed, order = tractable(table, Limits(entries=entries))
    assert sorted(order) == list(range(len(table.nodes)))
    for choice in every_choice(table):
        cost_s = cost_of(table, choice)
        if np.isfinite(cost_s):
            assert cost_of(relaxed, choice) <= cost_s * (1 + 1e-12)
            assert memory_of(relaxed, choice) <= memory_of(table, choice)


def test_edges_go_only_where_they_must():
    dense = checked(random_table(0, num_nodes=7, num_edges=21, sizes=(4, 4), forbidden=0.0))
    assert len(tractable(dense, Limits())[0].edges) == 21
    kept = [len(tractable(dense, Limits(entries=4**width))[0].edges) for width in (0, 1, 2, 3)]
    assert kept[0] == 0
    assert 0 < kept[1] < kept[2] < kept[3] < 21
