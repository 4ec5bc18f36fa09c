import sys
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autopar.errors import InfeasibleError
from autopar.search.check_table import checked
from autopar.search.cp_sat.refine import WORKER, refine
from autopar.search.cp_sat.worker import solve_integer
from autopar.search.deadline import Deadline
from autopar.search.search_state import State, beginning, with_known
from autopar.search.table import CostTable, Node, cost_of, memory_of
from tests.search.tables import brute_force, random_table, small_tables

pytestmark = pytest.mark.filterwarnings("error")

SLEEPING = (sys.executable, "-c", "import time; time.sleep(60)")
ANSWERS_THEN_SLEEPS = (
    sys.executable,
    "-c",
    "import time; print('{\"strategies\": [1, 1]}', flush=True); time.sleep(60)",
)
FAILING = (sys.executable, "-c", "raise SystemExit('out of luck')")
TWO = CostTable((Node("a", np.array([2.0, 1.0]), np.zeros(2)),) * 2, ())


def started(table: CostTable, incumbent: tuple[int, ...] | None) -> State:
    """The table with nothing known but the incumbent."""
    return with_known(beginning(table), () if incumbent is None else (incumbent,))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_tables(limited=True))
def test_cp_sat_alone_is_brute_force(table):
    table = checked(table)
    truth = brute_force(table)
    if truth is None:
        with pytest.raises(InfeasibleError):
            list(refine(started(table, None), Deadline.after(20.0)))
        return
    *_, last = refine(started(table, None), Deadline.after(20.0))
    assert cost_of(table, last.best) == pytest.approx(truth[0], rel=1e-9)
    assert memory_of(table, last.best) <= table.memory_limit_bytes
    assert truth[0] * (1 - 1e-9) <= last.lower_bound_s <= truth[0] * (1 + 1e-14)


def test_from_an_incumbent_only_improvements_are_yielded():
    table = checked(random_table(3, num_nodes=6, num_edges=12, forbidden=0.0))
    start = (0,) * 6
    states = list(refine(started(table, start), Deadline.after(20.0)))
    ranks = [(cost_of(table, state.best), -state.lower_bound_s) for state in states]
    assert ranks == sorted(set(ranks), reverse=True)
    assert cost_of(table, states[-1].best) == pytest.approx(brute_force(table)[0], rel=1e-9)


def test_a_worker_that_hangs_is_killed_when_the_time_is_up():
    start = time.monotonic()
    assert list(refine(started(TWO, (0, 0)), Deadline.after(0.3), worker=SLEEPING)) == []
    assert time.monotonic() - start < 5.0


def test_a_worker_killed_before_it_has_read_its_problem_is_no_error():
    # more bytes than a pipe holds
    nodes = tuple(Node(f"n{i}", np.array([2.0, 1.0]), np.zeros(2)) for i in range(2000))
    wide = CostTable(nodes, ())
    assert list(refine(started(wide, (0,) * 2000), Deadline.after(0.3), worker=SLEEPING)) == []


def test_what_a_worker_found_before_it_hung_is_kept():
    (only,) = refine(started(TWO, (0, 0)), Deadline.after(2.0), worker=ANSWERS_THEN_SLEEPS)
    assert only.best == (1, 1)


def test_closing_early_kills_the_worker():
    start = time.monotonic()
    with closing(refine(started(TWO, (0, 0)), Deadline.after(60.0), worker=ANSWERS_THEN_SLEEPS)) as states:
        assert next(states).best == (1, 1)
    assert time.monotonic() - start < 20.0


def test_a_worker_that_fails_is_reported():
    with pytest.warns(UserWarning, match="out of luck"):
        assert list(refine(started(TWO, (0, 0)), Deadline.after(20.0), worker=FAILING)) == []


def test_the_worker_imports_neither_torch_nor_this_package():
    import subprocess

    script = (
        f"import sys, runpy; runpy.run_path({WORKER[-1]!r}); print(sorted({{'torch', 'autopar'}} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_the_same_problem_takes_the_same_path():
    # Many optima: with four equal strategies a node only the search order decides among them.
    cost, memory = np.zeros(4, np.int64), np.arange(4)
    pairs = np.indices((4, 4)).reshape(2, -1)
    edge = (pairs[0] + pairs[1]) % 2
    problem = {
        "nodes": [(cost, memory, np.ones(4, bool))] * 6,
        "edges": [(v, v + 1, *pairs, edge, np.zeros(16, np.int64)) for v in range(5)],
        "limit": 9,
        "hint": None,
        "bound": None,
        "time_limit_s": 20.0,
    }
    answers = [[], []]
    for seen in answers:
        solve_integer(problem, seen.append)
    found = [[answer["strategies"] for answer in seen if "strategies" in answer] for seen in answers]
    assert found[0] == found[1]
    assert found[0]
