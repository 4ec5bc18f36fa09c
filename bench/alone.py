"""The parts of the search, each by itself: `Part` is a function from a table and starts to what it found."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.search.bound import cheapest, trivial_bound
from autopar.search.descent import descend, landscape, own_starts
from autopar.search.eliminate import Limits
from autopar.search.lagrange import least_memory, maximise
from autopar.search.refine import refine
from autopar.search.relax import tractable
from autopar.search.solve import solve
from autopar.search.table import CostTable, cost_of
from bench.problem import Problem


@dataclass(frozen=True)
class Found:
    """Seconds of the best choice within the limit (`inf` if none was met) and a proven bound (`-inf` if the part proves nothing)."""

    cost_s: float
    bound_s: float


def by_descent(problem: Problem, time_limit_s: float) -> Found:
    """Coordinate descent from the hand plans and from starts of its own."""
    land = landscape(problem.table)
    starts = (*problem.starts, *own_starts(land))
    return Found(_cost(problem.table, cheapest(problem.table, (*problem.starts, *(descend(land, start) for start in starts)))), -math.inf)


def by_elimination(problem: Problem, time_limit_s: float) -> Found:
    """Elimination in min-plus algebra, a price on memory carrying the limit; the best choice that a price met."""
    relaxed, order = tractable(problem.table, Limits())
    known = [] if problem.table.memory_limit_bytes == math.inf else [least_memory(relaxed, order)[1]]
    dual = maximise(relaxed, order, feasible=cheapest(problem.table, known))
    return Found(_cost(problem.table, cheapest(problem.table, (*known, *dual.met))), dual.bound_s)


def by_cp_sat(problem: Problem, time_limit_s: float) -> Found:
    """CP-SAT on the whole table, without a hint."""
    found = Found(math.inf, trivial_bound(problem.table))
    for choice in refine(problem.table, None, found.bound_s, time_limit_s=time_limit_s):
        found = Found(choice.cost_s, choice.lower_bound_s)
    return found


def together(problem: Problem, time_limit_s: float) -> Found:
    """All three, as a plan is searched."""
    choice = solve(problem.table, starts=problem.starts, time_limit_s=time_limit_s)
    return Found(choice.cost_s, choice.lower_bound_s)


PARTS: Mapping[str, Callable[[Problem, float], Found]] = {
    "coordinate descent": by_descent,
    "exact elimination": by_elimination,
    "CP-SAT": by_cp_sat,
    "all three": together,
}


def _cost(table: CostTable, choice: tuple[int, ...] | None) -> float:
    return math.inf if choice is None else cost_of(table, choice)


def binding_limit(table: CostTable, time_limit_s: float) -> float:
    """Bytes half way from the least that would do to what the cheapest choice takes."""
    free = replace(table, memory_limit_bytes=math.inf)
    least, _ = least_memory(*tractable(free, Limits()))
    return (least + solve(free, time_limit_s=time_limit_s).memory_bytes) / 2
