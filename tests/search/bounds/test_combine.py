from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.bounds.combine import combine
from autopar.search.bounds.prune import restrict, unreduced
from autopar.search.check_table import checked
from autopar.search.deadline import NEVER
from autopar.search.table import cost_of, memory_of
from tests.search.tables import block_table, brute_force, every_choice, random_table, small_tables


@settings(max_examples=80)
@given(small_tables(limited=True) | small_tables(limited=False), st.randoms(use_true_random=False))
def test_it_is_as_good_as_the_best_of_what_the_choices_hold(table, random):
    table = checked(table)
    some = random.sample(every_choice(table), 3)
    held = restrict(unreduced(table), [np.unique(strategies) for strategies in zip(*some)])
    truth, found = brute_force(held.table), combine(table, some, deadline=NEVER)
    assert bool(found) == (truth is not None)
    for choice in found:
        assert all(k in {one[v] for one in some} for v, k in enumerate(choice))
    if found:
        assert memory_of(table, found[0]) <= table.memory_limit_bytes
        assert cost_of(table, found[0]) <= truth[0] * (1 + 1.1e-3)
    for above, within in [found[1:]] if len(found) > 1 else []:
        assert memory_of(table, above) > table.memory_limit_bytes >= memory_of(table, within)
        assert cost_of(table, above) < truth[0] * (1 + 1e-9)


def test_two_choices_give_one_that_fills_the_limit():
    table = block_table(num_nodes=20, num_strategies=6)
    light, heavy = (
        tuple(int(getattr(node, term).argmin()) for node in table.nodes) for term in ("memory_bytes", "cost_s")
    )
    limited = replace(table, memory_limit_bytes=(memory_of(table, light) + memory_of(table, heavy)) / 2)
    found, *_ = combine(limited, [light, heavy], deadline=NEVER)
    assert memory_of(limited, found) <= limited.memory_limit_bytes
    assert cost_of(limited, found) < cost_of(limited, light)


def test_of_choices_that_hold_too_much_the_best_is_taken():
    dense = random_table(0, num_nodes=9, num_edges=36, sizes=(12, 12), forbidden=0.0)
    choices = [tuple((k + v) % 12 for v in range(9)) for k in range(12)]
    assert combine(dense, choices, deadline=NEVER) == (min(choices, key=lambda choice: cost_of(dense, choice)),)
    assert not combine(replace(dense, memory_limit_bytes=-1.0), choices, deadline=NEVER)
