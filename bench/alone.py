"""The parts of the search, each by itself: `Part` is a function from a table and starts to what it found."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic

from autopar.search.bounds.lagrange import by_elimination, by_messages, maximise, memory_only
from autopar.search.bounds.trws import pass_messages
from autopar.search.check_table import checked
from autopar.search.coordinate_descent import descend, landscape, own_starts
from autopar.search.cp_sat.refine import refine
from autopar.search.deadline import Deadline
from autopar.search.min_plus.eliminate import Limits, elimination_order
from autopar.search.search_state import State, beginning, cheapest, is_solved, trivial_bound, with_known
from autopar.search.solve import SOLVERS, solve
from autopar.search.table import CostTable, cost_of, memory_of
from bench.problem import Problem

# The search has more time than it should need.
SEARCH_LIMIT_S = 60.0
# The rows of `SOLVERS` up to the bound.
_NUM_BOUNDING = [row.name for row in SOLVERS].index("bound") + 1
# Elimination is tried up to so much work; above it takes longer than the second that a search may take.
_EXACT = Limits(additions=1e9)


@dataclass(frozen=True)
class Found:
    """Seconds of the best choice within the limit (`inf` if none was met) and a proven bound (`-inf` if the part proves
    nothing).
    """

    cost_s: float
    bound_s: float


def by_descent(problem: Problem, time_limit_s: float) -> Found:
    """Coordinate descent from the hand plans and from starts of its own."""
    land = landscape(problem.table)
    starts = (*problem.starts, *own_starts(land))
    return Found(
        _cost(problem.table, cheapest(problem.table, (*problem.starts, *(descend(land, start) for start in starts)))),
        -math.inf,
    )


def by_bound(problem: Problem, time_limit_s: float) -> Found:
    """Elimination in min-plus algebra, messages where that takes too long; a price on memory carries the limit. The
    best choice met.
    """
    table, order = problem.table, elimination_order(problem.table, _EXACT)
    known = [] if table.memory_limit_bytes == math.inf else [lightest(table)]
    feasible = cheapest(table, known)
    evaluate = by_messages(feasible) if order is None else by_elimination(order)
    dual = maximise(table, evaluate, feasible=feasible, deadline=Deadline.after(time_limit_s))
    return Found(_cost(table, cheapest(table, (*known, *dual.met))), dual.bound_s)


def by_cp_sat(problem: Problem, time_limit_s: float) -> Found:
    """CP-SAT on the whole table, the best hand plan as its hint."""
    hint = cheapest(problem.table, problem.starts)
    found = Found(_cost(problem.table, hint), trivial_bound(problem.table))
    start = with_known(beginning(problem.table), () if hint is None else (hint,))
    for state in refine(start, Deadline.after(time_limit_s)):
        found = Found(cost_of(problem.table, state.best), state.lower_bound_s)
    return found


def together(problem: Problem, time_limit_s: float) -> Found:
    """All three, as a plan is searched."""
    choice = solve(problem.table, starts=problem.starts, deadline=Deadline.after(time_limit_s))
    return Found(choice.cost_s, choice.lower_bound_s)


PARTS: Mapping[str, Callable[[Problem, float], Found]] = {
    "coordinate descent": by_descent,
    "bound": by_bound,
    "CP-SAT": by_cp_sat,
    "all three": together,
}


def after_bound(problem: Problem, time_limit_s: float) -> dict[str, tuple[Found, float]]:
    """Where the bound leaves a gap: what it leaves, then what labels and CP-SAT each make of that, and their seconds.

    Both start from the same state and have `time_limit_s`.
    """
    state, start = beginning(checked(problem.table), problem.starts), monotonic()
    for row in SOLVERS[:_NUM_BOUNDING]:
        state = (state, *row.solve(state, Deadline.after(SEARCH_LIMIT_S)))[-1]
    found = {"bound": (_found(state), monotonic() - start)}
    for row in SOLVERS[_NUM_BOUNDING:] if state.best is not None and not is_solved(state) else ():
        start, last = monotonic(), state
        for last in row.solve(state, Deadline.after(time_limit_s)):
            if is_solved(last):
                break
        found[row.name] = _found(last), monotonic() - start
    return found


def _found(state: State) -> Found:
    return Found(_cost(state.reduced.table, state.best), state.lower_bound_s)


def _cost(table: CostTable, choice: tuple[int, ...] | None) -> float:
    return math.inf if choice is None else cost_of(table, choice)


def lightest(table: CostTable) -> tuple[int, ...]:
    """A choice of nearly the least memory."""
    return pass_messages(memory_only(table)).met[0]


def binding_limit(table: CostTable, time_limit_s: float, part: float = 0.5) -> float:
    """Bytes a `part` of the way, half by default, from nearly the least that would do to what the cheapest takes."""
    free = replace(table, memory_limit_bytes=math.inf)
    least, most = memory_of(table, lightest(free)), solve(free, deadline=Deadline.after(time_limit_s)).memory_bytes
    return least + part * (most - least)
