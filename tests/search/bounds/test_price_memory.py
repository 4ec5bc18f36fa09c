import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import InfeasibleError
from autopar.search.bounds import price_memory as price_memory_module
from autopar.search.bounds.lagrange import by_elimination, maximise
from autopar.search.bounds.price_memory import price_memory
from autopar.search.check_table import checked
from autopar.search.deadline import NEVER
from autopar.search.min_plus.eliminate import Limits, elimination_order
from autopar.search.search_state import Goal, beginning
from autopar.search.table import cost_of, memory_of
from tests.search.tables import block_table, brute_force, small_tables

NOTHING_IS_QUICK = Limits(additions=0.0)


@settings(max_examples=100)
@given(small_tables(limited=True))
def test_its_bound_is_that_of_the_best_price_and_its_choice_is_within_the_limit(table):
    table, truth = checked(table), brute_force(table)
    if truth is None:
        with pytest.raises(InfeasibleError):
            list(price_memory(beginning(table), NEVER, quick=NOTHING_IS_QUICK))
        return
    (state,) = price_memory(beginning(table), NEVER, quick=NOTHING_IS_QUICK)
    assert memory_of(table, state.incumbent) <= table.memory_limit_bytes
    assert state.lower_bound_s <= truth[0] * (1 + 1e-9) <= cost_of(table, state.incumbent) * (1 + 2e-9)
    order = elimination_order(table, Limits())
    dual = maximise(table, by_elimination(order), feasible=truth[1])
    assert state.lower_bound_s >= min(dual.bound_s, truth[0]) - 1e-9 * abs(truth[0])


@pytest.mark.parametrize("part", [0.3, 0.6])
def test_the_choices_around_a_limit_have_equal_objectives_and_the_incumbent_is_near_the_bound(part):
    table = block_table(num_nodes=40, num_strategies=12)
    light, heavy = (
        sum(float(getattr(one.memory_bytes, of)()) for one in (*table.nodes, *table.edges)) for of in ("min", "max")
    )
    limited = checked(
        block_table(num_nodes=40, num_strategies=12, memory_limit_bytes=light + part / 3 * (heavy - light))
    )
    (state,) = price_memory(beginning(limited), NEVER, quick=NOTHING_IS_QUICK)
    cost_s = cost_of(limited, state.incumbent)
    if state.around is not None:
        above, within = state.around
        assert memory_of(limited, above) > limited.memory_limit_bytes >= memory_of(limited, within)
        assert cost_of(limited, above) < state.lower_bound_s < cost_of(limited, within)
    assert 0 <= cost_s - state.lower_bound_s <= 0.05 * cost_s


def test_it_ends_once_nothing_can_beat_the_goal():
    table = block_table(num_nodes=40, num_strategies=12)
    least = sum(float(one.memory_bytes.min()) for one in (*table.nodes, *table.edges))
    limited = checked(block_table(num_nodes=40, num_strategies=12, memory_limit_bytes=2 * least))
    (full,) = price_memory(beginning(limited), NEVER, quick=NOTHING_IS_QUICK)
    goal = Goal(to_beat_s=0.9 * full.lower_bound_s)
    (early,) = price_memory(beginning(limited, goal=goal), NEVER, quick=NOTHING_IS_QUICK)
    assert goal.to_beat_s <= early.lower_bound_s <= full.lower_bound_s * (1 + 1e-9)


def test_no_more_prices_are_tried_than_the_goal_needs(monkeypatch):
    tried = []

    def counted(*args, **kwargs):
        tried.append(args)
        return least(*args, **kwargs)

    least = price_memory_module._least
    monkeypatch.setattr(price_memory_module, "_least", counted)
    table = block_table(num_nodes=40, num_strategies=12)
    limit = 2 * sum(float(one.memory_bytes.min()) for one in (*table.nodes, *table.edges))
    limited, nums = checked(block_table(num_nodes=40, num_strategies=12, memory_limit_bytes=limit)), []
    (best,) = price_memory(beginning(limited), NEVER, quick=NOTHING_IS_QUICK)
    for goal in (Goal(), Goal(gap=0.1), Goal(to_beat_s=0.5 * best.lower_bound_s)):
        tried.clear()
        (state,) = price_memory(beginning(limited, goal=goal), NEVER, quick=NOTHING_IS_QUICK)
        nums.append(len(tried))
        assert state.lower_bound_s >= min(goal.to_beat_s, (1 - goal.gap) * best.lower_bound_s)
    assert nums[0] > nums[1] and nums[0] > nums[2]


def test_tables_without_a_limit_or_quick_to_eliminate_are_left_to_others():
    table = checked(block_table(num_nodes=20, num_strategies=4))
    assert not list(price_memory(beginning(table), NEVER, quick=NOTHING_IS_QUICK))
    limited = checked(block_table(num_nodes=20, num_strategies=4, memory_limit_bytes=1e12))
    assert not list(price_memory(beginning(limited), NEVER, quick=Limits()))
    assert np.isfinite(limited.memory_limit_bytes)
