"""`best_shares`: the weights of paths under which the plans met so far have the best lower bound."""

from collections.abc import Sequence

from ortools.linear_solver import pywraplp


def best_shares(lengths: Sequence[Sequence[Sequence[float]]]) -> tuple[float, tuple[tuple[float, ...], ...]]:
    """(seconds, weights of sum 1 for each pass): those for which the least weighted length of any plan is the largest.

    `lengths`: of each plan and each pass, its seconds along each path; a plan takes the sum over the passes. No weights
    give these plans a larger lower bound. It is the linear program of a zero-sum game between a planner, who chooses
    among the plans, and the paths; with a new plan for each solution of it, this is Kelley's cutting-plane method
    (1960) for the best bound over all plans.
    """
    scale = max(length for of_plan in lengths for of_pass in of_plan for length in of_pass)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    shares = [[solver.NumVar(0.0, 1.0, "") for _ in of_pass] for of_pass in lengths[0]]
    least = solver.NumVar(-solver.infinity(), solver.infinity(), "")
    for of_pass in shares:
        solver.Add(sum(of_pass) == 1)
    every = [share for of_pass in shares for share in of_pass]
    for of_plan in lengths:
        along = [length for of_pass in of_plan for length in of_pass]
        solver.Add(sum(float(length / scale) * share for length, share in zip(along, every)) >= least)
    solver.Maximize(least)
    status = solver.Solve()
    assert status == pywraplp.Solver.OPTIMAL, f"a game has a value, found status {status}"
    solution = [[max(0.0, share.solution_value()) for share in of_pass] for of_pass in shares]
    return least.solution_value() * scale, tuple(tuple(one / sum(found) for one in found) for found in solution)
