"""Closing the duality gap: search for a choice below a threshold above the bound, and raise it until there is one."""

from collections.abc import Generator, Sequence
from dataclasses import replace

from autopar.search.bounds.lagrange import by_elimination, from_least_memory, maximise
from autopar.search.bounds.pareto_labels import eliminate_labels
from autopar.search.coordinate_descent import descend, landscape
from autopar.search.deadline import Deadline
from autopar.search.min_plus.eliminate import Elimination, Limits, elimination_order
from autopar.search.search_state import TOLERANCE, State, cheapest, is_solved, proven
from autopar.search.table import cost_of

# Limits of the joint array of a bucket, and of all arrays together.
_LIMITS = Limits(entries=2e6, additions=3e8)
# The first threshold lies above the bound by this share of the gap: a narrow gap has few labels.
_FIRST_WINDOW = 1 / 16
# The most labels of a message, in successive attempts: fewer labels weaken the bound, more take longer.
_LABEL_COUNTS = (2_000, 20_000, 200_000, 2_000_000)


def close(now: State, deadline: Deadline, *, label_counts: Sequence[int] = _LABEL_COUNTS) -> Generator[State]:
    """Yield better incumbents and bounds of a squeezed table with a memory limit until the gap is closed.

    It ends early at the deadline, and yields nothing for a table that is too dense to eliminate. `label_counts`: the
    most labels of a message, in successive attempts.
    """
    table = now.reduced.table
    order = elimination_order(table, _LIMITS)
    if now.best is None or order is None:
        return
    light, land = from_least_memory(table), landscape(table)
    dual = maximise(table, by_elimination(order), feasible=now.best, deadline=deadline)
    elimination = dual.step.source
    assert isinstance(elimination, Elimination), "prices were evaluated by elimination"
    around = now.around if dual.around is None else now.lifted_pair(dual.around)
    now = _with_bound(replace(now, best=cheapest(table, (now.best, *dual.met)), around=around), dual.bound_s)
    yield now
    for most_labels in label_counts:
        window = (cost_of(table, now.incumbent) - dual.bound_s) * _FIRST_WINDOW
        while not is_solved(now):
            cost_s = cost_of(table, now.incumbent)
            window = max(window, 2.0 * (now.lower_bound_s - dual.bound_s))
            threshold = min(dual.bound_s + window, cost_s - TOLERANCE * abs(cost_s))
            front = eliminate_labels(
                light, elimination, dual.price, threshold, most_labels=most_labels, deadline=deadline
            )
            if front is None:
                return
            if front.choice is not None:
                now = replace(now, best=cheapest(table, (now.incumbent, front.choice, descend(land, front.choice))))
            now = _with_bound(now, front.bound_s)
            yield now
            if front.choice is not None:
                break


def _with_bound(now: State, bound_s: float) -> State:
    cost_s = cost_of(now.reduced.table, now.incumbent)
    return replace(now, lower_bound_s=proven(cost_s, max(now.lower_bound_s, bound_s), is_pruned=now.is_pruned))
