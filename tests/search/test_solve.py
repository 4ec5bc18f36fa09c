import re
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.search.bounds.lagrange import least_memory
from autopar.search.bounds.squeeze import squeeze
from autopar.search.check_table import checked
from autopar.search.cp_sat.refine import refine
from autopar.search.deadline import NEVER, Deadline
from autopar.search.min_plus.eliminate import Limits, elimination_order
from autopar.search.search_state import beginning, with_known
from autopar.search.solve import SOLVERS, Row, solve
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of
from tests.search.tables import block_table, brute_force, every_choice, random_table, small_tables

pytestmark = pytest.mark.filterwarnings("error")

SLEEPING = (sys.executable, "-c", "import time; time.sleep(60)")
HANGING = (*SOLVERS[:-1], Row("refine", partial(refine, worker=SLEEPING)))


def limited_table() -> CostTable:
    """Dense, limited, and beyond what bounds alone close."""
    table = random_table(1, num_nodes=6, num_edges=15, sizes=(4, 4), forbidden=0.0)
    memory = sorted(memory_of(table, choice) for choice in every_choice(table))
    return replace(table, memory_limit_bytes=memory[len(memory) // 20])


def hard_table() -> CostTable:
    """Limited, and too dense for bounds and labels to close the gap."""
    table = random_table(1, num_nodes=14, num_edges=91, sizes=(5, 5), forbidden=0.0)
    rng = np.random.default_rng(0)
    memory = sorted(memory_of(table, tuple(rng.integers(0, 5, 14))) for _ in range(1000))
    return replace(table, memory_limit_bytes=memory[50])


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(small_tables(limited=False))
def test_without_a_limit_solve_is_brute_force(table):
    truth = brute_force(table)
    if truth is None:
        with pytest.raises(InfeasibleError, match=r"forbidden|no strategy"):
            solve(table)
        return
    found = solve(table)
    assert found.cost_s == pytest.approx(truth[0], rel=1e-12)
    assert found.gap < 1e-9


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(small_tables(limited=True))
def test_with_a_limit_solve_is_brute_force(table):
    truth = brute_force(table)
    if truth is None:
        with pytest.raises(InfeasibleError):
            solve(table)
        return
    found = solve(table)
    assert found.cost_s == pytest.approx(truth[0], rel=1e-9)
    assert found.cost_s == cost_of(table, found.strategies)
    assert found.memory_bytes == memory_of(table, found.strategies) <= table.memory_limit_bytes
    assert found.lower_bound_s <= truth[0] * (1 + 1e-14)
    assert found.gap < 1e-9


@settings(max_examples=30)
@given(small_tables(limited=True))
def test_bounds_hold_when_the_graph_is_too_dense_to_eliminate(table):
    truth = brute_force(table)
    if truth is None:
        return
    start = with_known(beginning(checked(table)), [truth[1]])
    for state in squeeze(start, NEVER, most_additions=100.0):
        assert state.lower_bound_s <= truth[0] * (1 + 1e-14)
        assert cost_of(table, state.reduced.lift(state.best)) == pytest.approx(truth[0], rel=1e-9)


@settings(max_examples=20)
@given(small_tables(limited=True))
def test_never_worse_than_a_start_even_without_time(table):
    truth = brute_force(table)
    if truth is None:
        return
    found = solve(table, starts=[truth[1]], deadline=Deadline.after(0.0))
    assert found.cost_s <= truth[0]


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(small_tables(limited=False), st.booleans())
def test_where_memory_is_free_there_is_a_choice_without_time_and_starts(table, is_limited):
    most_bytes = sum(float(part.memory_bytes.max()) for part in (*table.nodes, *table.edges))
    table = replace(table, memory_limit_bytes=most_bytes) if is_limited else table
    forbidden = [choice for choice in every_choice(table) if cost_of(table, choice) == float("inf")][:2]
    if brute_force(table) is not None:
        found = solve(table, starts=forbidden, deadline=Deadline.after(0.0))
        assert found.lower_bound_s <= found.cost_s == cost_of(table, found.strategies) < float("inf")


def test_the_same_table_gives_the_same_choice():
    assert solve(limited_table()) == solve(limited_table())


def test_progress_only_ever_improves():
    seen = []
    found = solve(limited_table(), progress=lambda *state: seen.append(state))
    assert [stage for stage, _, _ in seen] == sorted(
        (stage for stage, _, _ in seen), key=[row.name for row in SOLVERS].index
    )
    ranks = [(cost_s, -bound_s) for _, cost_s, bound_s in seen]
    assert ranks == sorted(ranks, reverse=True)
    assert seen[-1] == (seen[-1][0], found.cost_s, found.lower_bound_s)


def test_a_solver_that_hangs_costs_the_time_limit_and_no_more():
    start = time.monotonic()
    found = solve(hard_table(), deadline=Deadline.after(1.0), solvers=HANGING)
    assert 0.9 < time.monotonic() - start < 20.0
    assert found.gap > 1e-9
    assert found.memory_bytes <= hard_table().memory_limit_bytes


def test_a_deadline_that_is_moved_to_now_ends_the_search_with_the_best_known():
    deadline, start = Deadline.after(60.0), time.process_time()
    timer = threading.Timer(1.0, deadline.stop)
    timer.start()
    found = solve(hard_table(), deadline=deadline.part(1.0), solvers=HANGING)
    assert timer.finished.is_set() and time.process_time() - start < 30.0
    assert found.memory_bytes <= hard_table().memory_limit_bytes


def test_infeasible_says_the_least_that_would_do():
    node = Node("w", np.array([1.0, 2.0]), np.array([4 * 2.0**30, 3 * 2.0**30]))
    table = CostTable((node, node), (), 5 * 2.0**30)
    with pytest.raises(
        InfeasibleError, match=r"5368709120 bytes \(5.00 GiB\).*least that would do is 6442450944 bytes \(6.00 GiB\)"
    ):
        solve(table)
    for deadline in (NEVER, Deadline.after(0.0)):
        assert solve(replace(table, memory_limit_bytes=6 * 2.0**30), deadline=deadline).strategies == (1, 1)


def test_a_pair_of_nodes_that_exclude_each_other_is_infeasible():
    apart = Edge(0, 1, np.full((2, 2), np.inf), np.zeros((2, 2)))
    node = Node("w", np.zeros(2), np.zeros(2))
    with pytest.raises(InfeasibleError, match="forbidden"):
        solve(CostTable((node, node), (apart,)))


def test_nothing_to_choose():
    assert solve(CostTable((), ())).strategies == ()
    assert solve(CostTable((Node("only", np.array([3.0, 1.0]), np.zeros(2)),), ())).strategies == (1,)


def test_a_start_that_does_not_fit_the_table_is_refused():
    with pytest.raises(ValueError, match=r"start \(0, 7\)"):
        solve(CostTable((Node("a", np.zeros(2), np.zeros(2)),) * 2, ()), starts=[(0, 7)])


def test_a_transformer_block_is_solved_exactly_and_fast():
    found = solve(block_table(num_nodes=75, num_strategies=49))
    assert found.gap < 1e-12
    limited = solve(block_table(num_nodes=75, num_strategies=49, memory_limit_bytes=6e8), deadline=Deadline.after(10.0))
    assert limited.memory_bytes <= 6e8
    assert found.cost_s < limited.cost_s
    assert limited.gap < 0.005


def test_an_impossible_limit_on_a_large_table_is_refused_with_the_least_that_would_do():
    table = block_table(num_nodes=40, num_strategies=100)
    assert elimination_order(table, Limits(additions=2e7)) is None, (
        "small enough for elimination: this would test nothing"
    )
    exact, _ = least_memory(table, elimination_order(table))
    with pytest.raises(InfeasibleError, match=r"the least that would do is (between )?\d+") as refused:
        solve(replace(table, memory_limit_bytes=0.9 * exact), deadline=Deadline.after(60.0))
    least, *found = (
        float(number) for number in re.findall(r"(\d+) (?:and|bytes)", str(refused.value).split("would do is")[1])
    )
    assert least - 1 <= exact <= (found or [least])[0] + 1
    assert least > 0.99 * exact
    near = solve(replace(table, memory_limit_bytes=1.05 * exact), deadline=Deadline.after(60.0), enough_gap=0.5)
    assert near.memory_bytes <= 1.05 * exact


@settings(max_examples=60)
@given(small_tables(limited=True))
def test_a_brief_search_bounds_and_gives_choices_around_a_limit_that_binds(table):
    truth = brute_force(checked(table))
    if truth is None:
        return
    found = solve(table, is_brief=True, deadline=Deadline.after(30.0))
    assert found.lower_bound_s <= truth[0] * (1 + 1e-12) and truth[0] <= found.cost_s * (1 + 1e-12)
    assert found.memory_bytes <= table.memory_limit_bytes
    if found.around is None:
        assert found.cost_s == pytest.approx(truth[0], rel=1e-9)
    else:
        above, within = (memory_of(checked(table), end) for end in found.around)
        assert above > table.memory_limit_bytes >= within


@settings(max_examples=60)
@given(small_tables(limited=True), st.floats(0.1, 2.0))
def test_a_search_that_cannot_win_is_given_up_with_a_bound_that_says_so(table, part):
    truth = brute_force(checked(table))
    if truth is None:
        return
    found = solve(table, to_beat_s=part * truth[0], deadline=Deadline.after(30.0))
    assert found.lower_bound_s <= truth[0] * (1 + 1e-12) and truth[0] <= found.cost_s * (1 + 1e-12)
    assert found.lower_bound_s >= part * truth[0] or found.cost_s == pytest.approx(truth[0], rel=1e-9)
