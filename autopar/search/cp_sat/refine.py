"""Refinement by CP-SAT, in a child process that is killed at the deadline.

CP-SAT may overrun its own time limit, and may not return at all; the child can do neither to this process, which
already has all solutions that it reported.

Costs become integers of a power-of-two unit u, about 2^-40 of the incumbent (larger when the table's costs span more
than 2^55 units). They are rounded down, so the integer optimum times u is a lower bound; it is below the true optimum
by at most u a node and an edge, about 2e-10 of the cost for 200 of them. Memory is rounded down too, in units that make
whole bytes exact up to 2^50 bytes in all: no choice within the limit is lost, and what comes back is checked against
the true limit.
"""

import json
import math
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from autopar.errors import InfeasibleError, warn
from autopar.search.deadline import Deadline
from autopar.search.search_state import State, num_entries, proven
from autopar.search.table import Choice, CostTable, cost_of, memory_of

# `-P` keeps this directory off the worker's import path, where `table.py` and others would shadow modules.
WORKER = (sys.executable, "-P", str(Path(__file__).with_name("worker.py")))

# Seconds between looks at the deadline, which may be moved to now while this process waits for an answer.
_PATIENCE_S = 0.1

_COST_BITS, _WIDEST_BITS, _MEMORY_BITS = 40, 55, 50


def refine(
    state: State, deadline: Deadline, *, most_variables: float = math.inf, worker: Sequence[str] = WORKER
) -> Generator[State]:
    """Yield better incumbents or bounds until the table is solved or the deadline has passed.

    The incumbent is the hint; without one, nothing is yielded until CP-SAT has a solution. A table of more than
    `most_variables` strategies and allowed pairs, each of which is a variable, is left as it is. `worker`: the command
    of the child process. Closing the iterator, or an exception in the consumer, kills it. A failure of the process is
    reported by a warning.
    """
    table = state.reduced.table
    if deadline.is_past or num_entries(table) > most_variables:
        return
    for improved in _improvements(table, state.best, state.lower_bound_s, deadline, worker):
        bound_s = proven(improved.cost_s, improved.lower_bound_s, is_pruned=state.is_pruned)
        yield replace(state, best=improved.strategies, lower_bound_s=bound_s)


def _improvements(
    table: CostTable, incumbent: tuple[int, ...] | None, lower_bound_s: float, deadline: Deadline, worker: Sequence[str]
) -> Iterator[Choice]:
    """Ever better choices or bounds of the table as it is."""
    cost_unit = _cost_unit(table, incumbent)
    problem = _integer_problem(table, incumbent, cost_unit) | {"time_limit_s": deadline.remaining_s}
    best = None if incumbent is None else _choice(table, incumbent, lower_bound_s)
    with _started(worker, problem) as answers:
        while (answer := _next(answers, deadline)) is not None:
            if answer.get("status") == "INFEASIBLE" and best is None:
                raise InfeasibleError(
                    f"no choice fits in {table.memory_limit_bytes:.0f} bytes per device; raise the limit"
                )
            better = _improved(table, best, answer, lower_bound_s, cost_unit)
            lower_bound_s = max(lower_bound_s, answer.get("bound", -math.inf) * cost_unit)
            if better is not None:
                best = better
                yield best
            if "status" in answer:
                return


def _next(answers: "queue.Queue[str | None]", deadline: Deadline) -> dict[str, Any] | None:
    """The worker's next answer; None if it has ended or the deadline has passed."""
    while not deadline.is_past:
        with suppress(queue.Empty):
            line = answers.get(timeout=min(_PATIENCE_S, deadline.remaining_s))
            return None if line is None else json.loads(line)
    return None


def _send(stdin: IO[bytes], problem: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the exit code of a worker that has ended is checked elsewhere
        pickle.dump(problem, stdin)
        stdin.flush()


def _receive(child: "subprocess.Popen[bytes]", lines: "queue.Queue[str | None]") -> None:
    assert child.stdout is not None, "the worker was started with a pipe"
    for line in child.stdout:
        lines.put(line.decode())
    child.wait()  # the exit code must be known before the reader sees the end
    lines.put(None)


def _improved(
    table: CostTable, best: Choice | None, answer: dict[str, Any], lower_bound_s: float, cost_unit: float
) -> Choice | None:
    """The best choice and bound after the answer; None if it improves neither."""
    if "strategies" in answer:
        choice = _choice(table, tuple(answer["strategies"]), lower_bound_s)
        is_better = choice.memory_bytes <= table.memory_limit_bytes and (best is None or choice.cost_s < best.cost_s)
        return choice if is_better else None
    if best is None or answer.get("bound", -math.inf) * cost_unit <= best.lower_bound_s:
        return None
    return _choice(table, best.strategies, answer["bound"] * cost_unit)


def _choice(table: CostTable, strategies: tuple[int, ...], lower_bound_s: float) -> Choice:
    cost_s = cost_of(table, strategies)
    return Choice(strategies, cost_s, memory_of(table, strategies), min(lower_bound_s, cost_s))


def _cost_unit(table: CostTable, incumbent: tuple[int, ...] | None) -> float:
    widest = sum(_largest(part.cost_s) for part in (*table.nodes, *table.edges))
    usual = widest if incumbent is None else abs(cost_of(table, incumbent)) or widest
    return _power_of_two(max(usual * 2.0**-_COST_BITS, widest * 2.0**-_WIDEST_BITS))


def _integer_problem(table: CostTable, incumbent: tuple[int, ...] | None, cost_unit: float) -> dict[str, Any]:
    """The problem for `worker.solve_integer`, without the time limit."""
    most_memory = sum(_largest(part.memory_bytes) for part in (*table.nodes, *table.edges))
    memory_unit = _power_of_two(most_memory * 2.0**-_MEMORY_BITS)
    edges = []
    for edge in table.edges:
        ka, kb = np.nonzero(np.isfinite(edge.cost_s))
        edges.append(
            (
                edge.a,
                edge.b,
                ka,
                kb,
                _floor(edge.cost_s[ka, kb], cost_unit),
                _floor(edge.memory_bytes[ka, kb], memory_unit),
            )
        )
    return {
        "nodes": [
            (_floor(n.cost_s, cost_unit), _floor(n.memory_bytes, memory_unit), np.isfinite(n.cost_s))
            for n in table.nodes
        ],
        "edges": edges,
        "limit": math.floor(table.memory_limit_bytes / memory_unit) if table.memory_limit_bytes < most_memory else None,
        "hint": None if incumbent is None else list(incumbent),
    }


def _floor(values: np.ndarray, unit: float) -> np.ndarray:
    return np.floor(np.where(np.isfinite(values), values, 0.0) / unit).astype(np.int64)


def _power_of_two(least: float) -> float:
    return 2.0 ** math.ceil(math.log2(least)) if least > 0 else 1.0


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


@contextmanager
def _started(worker: Sequence[str], problem: dict[str, Any]) -> Iterator["queue.Queue[str | None]"]:
    """A context whose value is the queue of the worker's lines, None at their end; the worker is killed at exit.

    The worker is in another session: Ctrl-C must reach this process, which has the incumbent, and not the worker.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        threads = (
            threading.Thread(target=_send, args=(child.stdin, problem)),
            threading.Thread(target=_receive, args=(child, lines)),
        )
        try:
            for thread in threads:
                thread.start()
            yield lines
        finally:
            is_running = child.poll() is None
            child.kill()
            code = child.wait()
            for thread in threads:
                thread.join()
            for pipe in (child.stdin, child.stdout):
                with suppress(BrokenPipeError):  # input that the killed worker has not read cannot be flushed
                    if pipe is not None:
                        pipe.close()
        if code and not is_running:
            log.seek(0)
            said = log.read()[-2000:].decode(errors="replace")
            warn(f"the CP-SAT process ended with {code}; the plan may not be optimal:\n{said}")
