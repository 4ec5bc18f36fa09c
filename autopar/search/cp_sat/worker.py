"""The CP-SAT process: it reads an integer problem from stdin and writes each better choice and bound as a line of JSON.

It is run as a file and imports nothing of this package, so that it starts in a fraction of a second. It ends when its
stdin is closed, so that it cannot outlive the process that started it.
"""

import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

# A fixed number of threads, not that of the cores, so that a problem takes the same path on every machine.
_NUM_WORKERS = 8


def main() -> None:
    """Solve the problem on stdin."""
    # The solver logs to file descriptor 1 of the process: the answers must not mix with it.
    answers = os.dup(1)
    os.dup2(2, 1)
    problem = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_die_with_parent, daemon=True).start()

    def answer(response: dict[str, Any]) -> None:
        # a single write for each line: the solver calls from several threads
        os.write(answers, json.dumps(response).encode() + b"\n")

    solve_integer(problem, answer)


def solve_integer(problem: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """Solve `problem` and call `answer` with each better choice and bound.

    Answers: {"strategies": [...]}, {"bound": int} and, at the end, {"status": name}. `problem`: nodes = [(cost i64[K],
    memory i64[K], allowed bool[K])], edges = [(a, b, ka, kb, cost, memory)] with one entry for each allowed pair of
    strategies, limit = int or None, hint = list or None, time_limit_s = float.
    """
    model = cp_model.CpModel()
    chosen = _build(model, problem)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = 0
    solver.parameters.num_workers = _NUM_WORKERS
    # Rounds of fixed work; otherwise the timing of the threads decides between equal solutions.
    solver.parameters.interleave_search = True
    solver.parameters.catch_sigint_signal = False  # the solver would leave the process without Python's own handler
    solver.parameters.relative_gap_limit = 0.0
    solver.parameters.absolute_gap_limit = 0.0
    solver.parameters.max_time_in_seconds = problem["time_limit_s"]
    solver.best_bound_callback = lambda bound: answer({"bound": _whole(bound)})
    status = solver.solve(model, _Printer(chosen, answer))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        answer({"strategies": [_taken(strategies, solver.boolean_value) for strategies in chosen]})
        answer({"bound": _whole(solver.best_objective_bound)})
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT refuses the model: {model.validate()}")
    answer({"status": solver.status_name(status)})


def _build(model: cp_model.CpModel, problem: dict[str, Any]) -> list[list[Any]]:
    """Build the model, with a variable for each node and strategy, and for each allowed pair of an edge.

    exactly one strategy a node;  sum over kb of pair[ka, kb] = node_a[ka], and likewise for b; sum of memory <= limit;
    minimise the sum of cost.
    """
    chosen = [[model.new_bool_var("") for _ in cost] for cost, _, _ in problem["nodes"]]
    variables, costs, memory = [], [], []
    for strategies, (cost, size, allowed) in zip(chosen, problem["nodes"]):
        model.add_exactly_one(strategies)
        model.add(sum(strategies[k] for k in np.flatnonzero(~allowed)) == 0)
        variables += strategies
        costs.append(cost)
        memory.append(size)
    for a, b, ka, kb, cost, size in problem["edges"]:
        pairs = [model.new_bool_var("") for _ in ka]
        _tie(model, pairs, ka, chosen[a])
        _tie(model, pairs, kb, chosen[b])
        variables += pairs
        costs.append(cost)
        memory.append(size)
        if problem["hint"] is not None:
            _hint(model, pairs, (ka == problem["hint"][a]) & (kb == problem["hint"][b]))
    for strategies, k in zip(chosen, problem["hint"] or ()):
        _hint(model, strategies, np.arange(len(strategies)) == k)
    objective = cp_model.LinearExpr.weighted_sum(variables, np.concatenate(costs).tolist())
    if problem["limit"] is not None:
        model.add(cp_model.LinearExpr.weighted_sum(variables, np.concatenate(memory).tolist()) <= problem["limit"])
    # No constraint that the objective is at least a known bound: with it CP-SAT 9.15 calls a worse choice optimal.
    model.minimize(objective)
    return chosen


def _tie(model: cp_model.CpModel, pairs: list[Any], index: np.ndarray, strategies: list[Any]) -> None:
    """Constrain a strategy to be taken exactly when one of its pairs is."""
    members: list[list[Any]] = [[] for _ in strategies]
    for pair, k in zip(pairs, index):
        members[k].append(pair)
    for strategy, its_pairs in zip(strategies, members):
        model.add(sum(its_pairs) == strategy)


def _hint(model: cp_model.CpModel, variables: list[Any], values: np.ndarray) -> None:
    for variable, value in zip(variables, values):
        model.add_hint(variable, bool(value))


def _taken(strategies: list[Any], value: Callable[[Any], bool]) -> int:
    return next(k for k, variable in enumerate(strategies) if value(variable))


def _whole(bound: float) -> int:
    # CP-SAT reports integers as doubles; beyond 2^53 the conversion may have rounded up.
    return int(bound) if abs(bound) < 2**53 else int(bound) - int(abs(bound) * 2.0**-52) - 1


def _die_with_parent() -> None:
    while os.read(0, 1):  # not `sys.stdin`: its lock, held here, would break the interpreter's way out
        pass
    os._exit(1)


class _Printer(cp_model.CpSolverSolutionCallback):
    """Callback of the solver that reports each better choice."""

    def __init__(self, chosen: list[list[Any]], answer: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._chosen, self._answer = chosen, answer

    def on_solution_callback(self) -> None:
        """Report the solution; called by CP-SAT."""
        self._answer({"strategies": [_taken(strategies, self.boolean_value) for strategies in self._chosen]})


if __name__ == "__main__":
    main()
