import math
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
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of
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


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(small_tables(limited=True))
def test_cp_sat_alone_is_brute_force(table):
    table = checked(table)
    truth = brute_force(table)
    if truth is None:
        with pytest.raises(InfeasibleError):
            list(refine(started(table, None), Deadline.after(300.0)))
        return
    *_, last = refine(started(table, None), Deadline.after(300.0))
    assert cost_of(table, last.best) == pytest.approx(truth[0], rel=1e-9)
    assert memory_of(table, last.best) <= table.memory_limit_bytes
    assert truth[0] * (1 - 1e-9) <= last.lower_bound_s <= truth[0] * (1 + 1e-14)


def test_a_known_bound_does_not_mislead_it():
    """CP-SAT 9.15 called another choice optimal when its objective was constrained to be at least the bound."""
    inf, costs, sizes = math.inf, [], []
    costs += [[1.647e-3, 2.873e-3, 1.308e-3], [inf, inf, 1.41e-4, inf], [inf, 1.204e-3], [9.49e-4, 6.6e-5]]
    costs += [[1e-3, 0.0, 4.86e-4, 8.3e-5]]
    sizes += [[68e6, 432e6, 469e6], [0.0, 0.0, 488e6, 0.0], [0.0, 668e6], [984e6, 977e6], [98e6, 224e6, 773e6, 345e6]]
    nodes = tuple(Node(f"n{i}", np.array(cost), np.array(size)) for i, (cost, size) in enumerate(zip(costs, sizes)))
    short = np.array([[1.606e-3, 2e-3], [3.05e-4, 5.1e-5], [2.2e-5, 5.92e-4]])
    long = np.array([[9.36e-4, 1e-3, 0.0, 3.287e-3], [inf, 1.359e-3, 1.22e-4, 1.3e-3], [inf, 1.455e-3, 1e-3, inf]])
    of_short = np.array([[735e6, 628e6], [699e6, 876e6], [544e6, 571e6]])
    of_long = np.array([[836e6, 953e6, 194e6, 460e6], [0.0, 498e6, 522e6, 311e6], [0.0, 792e6, 333e6, 0.0]])
    table = checked(CostTable(nodes, (Edge(0, 2, short, of_short), Edge(0, 4, long, of_long)), 4941586947.0))
    *_, last = refine(started(table, None), Deadline.after(300.0))
    assert cost_of(table, last.best) == pytest.approx(brute_force(table)[0], rel=1e-9)


def test_from_an_incumbent_only_improvements_are_yielded():
    table = checked(random_table(3, num_nodes=6, num_edges=12, forbidden=0.0))
    start = (0,) * 6
    states = list(refine(started(table, start), Deadline.after(300.0)))
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
        assert list(refine(started(TWO, (0, 0)), Deadline.after(300.0), worker=FAILING)) == []


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
        "time_limit_s": 20.0,
    }
    answers = [[], []]
    for seen in answers:
        solve_integer(problem, seen.append)
    found = [[answer["strategies"] for answer in seen if "strategies" in answer] for seen in answers]
    assert found[0] == found[1]
    assert found[0]
