"""`best_shares`: the weights of paths under which the plans met so far have the best lower bound."""

from collections.abc import Sequence

import numpy as np
from ortools.linear_solver import pywraplp


def best_shares(lengths: Sequence[Sequence[float]]) -> tuple[float, tuple[float, ...]]:
    """(seconds, weights of sum 1): the weights for which the least weighted length of any plan is the largest, and it.

    `lengths`: of each plan, its seconds along each path. No weights give these plans a larger lower bound. It is the
    linear program of a zero-sum game between a planner, who chooses among the plans, and the paths; with a new plan for
    each solution of it, this is Kelley's cutting-plane method (1960) for the best bound over all plans.
    """
    scale = np.max(lengths)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    shares = [solver.NumVar(0.0, 1.0, "") for _ in lengths[0]]
    least = solver.NumVar(-solver.infinity(), solver.infinity(), "")
    solver.Add(sum(shares) == 1)
    for of_plan in lengths:
        solver.Add(sum(float(length / scale) * share for length, share in zip(of_plan, shares)) >= least)
    solver.Maximize(least)
    status = solver.Solve()
    assert status == pywraplp.Solver.OPTIMAL, f"a game has a value, found status {status}"
    solution = [max(0.0, share.solution_value()) for share in shares]
    return float(least.solution_value() * scale), tuple(share / sum(solution) for share in solution)
