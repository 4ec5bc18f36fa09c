"""Recombination: the best choice in which every node has a strategy that one of several given choices gives it.

Choices that are optimal at prices around the best one differ in few nodes. On the table of their strategies alone, a
thousandth of the whole, the best use of the memory limit is computed almost at once.
"""

from collections.abc import Generator, Sequence

import numpy as np

from autopar.search.bounds.close_gap import close
from autopar.search.bounds.lagrange import least_memory
from autopar.search.bounds.prune import restrict, unreduced
from autopar.search.deadline import Deadline
from autopar.search.min_plus.eliminate import Limits, argmin, eliminate, elimination_order
from autopar.search.search_state import State, cheapest, with_known
from autopar.search.table import CostTable, cost_of, memory_of

_LIMITS = Limits(entries=2e6, additions=3e7)
# A choice this near to the small table's bound is good enough: the bound of the whole table lies further below.
_ENOUGH = 1e-3
# The most labels of a message: more gain little.
_MOST_LABELS = (2_000,)


def recombine(state: State, deadline: Deadline) -> Generator[State]:
    """Yield the state with the recombination of its known choices, if memory is limited."""
    table = state.reduced.table
    if table.memory_limit_bytes < float("inf"):
        yield with_known(state, combine(table, state.lowered, deadline=deadline))


def combine(table: CostTable, choices: Sequence[tuple[int, ...]], *, deadline: Deadline) -> tuple[tuple[int, ...], ...]:
    """A choice within the memory limit no worse than any of `choices`; if the limit binds, also two around it.

    () if there is no such choice. If the table of their strategies is too large to search, the best of `choices`.
    """
    kept = [np.unique([choice[v] for choice in choices]) for v in range(len(table.nodes))]
    small = restrict(unreduced(table), kept)
    best = cheapest(table, choices)
    order = elimination_order(small.table, _LIMITS)
    if order is None:
        return () if best is None else (best,)
    if table.memory_limit_bytes == float("inf"):
        optimum = eliminate(small.table, order)
        return (small.lift(argmin(optimum)),) if optimum.value < float("inf") else ()
    first = best or small.lift(least_memory(small.table, order)[1])
    if memory_of(table, first) > table.memory_limit_bytes or cost_of(table, first) == float("inf"):
        return ()
    strategies, around = small.lower(first), None
    assert strategies is not None, "the first choice is among those that the small table holds"
    for state in close(State(small, strategies, -float("inf")), deadline, label_counts=_MOST_LABELS):
        strategies, around, cost_s = state.incumbent, state.around, cost_of(small.table, state.incumbent)
        if cost_s - state.lower_bound_s <= _ENOUGH * abs(cost_s):
            break
    return small.lift(strategies), *(around or ())
