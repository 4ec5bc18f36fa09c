"""`squeeze`: rounds of bounding a table at a price of memory, descending to better incumbents, and pruning.

The bound at a price comes from messages, which treat edges one by one, until so few strategies are left that
elimination is quick.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.bounds.combine import combine
from autopar.search.bounds.drop_edges import tractable
from autopar.search.bounds.lagrange import (
    Dual,
    Enough,
    around_limit,
    by_elimination,
    by_messages,
    least_memory,
    maximise,
    memory_only,
)
from autopar.search.bounds.prune import Reduced, reduce, restrict
from autopar.search.bounds.trws import pass_messages
from autopar.search.coordinate_descent import descend, landscape, shed
from autopar.search.deadline import Deadline
from autopar.search.min_plus.eliminate import Elimination, Limits, elimination_order
from autopar.search.min_plus.min_marginals import Marginals, min_marginals
from autopar.search.search_state import TOLERANCE, State, cheapest, is_closed, is_solved, num_entries, proven
from autopar.search.table import CostTable, Edge, cost_of, memory_of

_MOST_ROUNDS = 10
# An elimination within these limits takes less time than message passing.
QUICK = Limits(additions=2e7)
# An elimination of more additions takes a good part of a second: strategies are dropped before the price is optimal,
# and pairs not yet.
_SLOW_ADDITIONS = 2e8
# The relative tolerance of the bound by messages: more precision takes time that is better spent on the pruned table.
_ROUGH = 1e-3
# On a table of more strategies and pairs, testing dominance takes longer than the next round.
_REDUCIBLE_ENTRIES = 1e6
# The number of visited choices from which descents start.
_MOST_DESCENTS = 4
# The most moves that bring the best of them within the limit; the descents of the others reduce memory at any cost.
MOST_SHED = 8
# A round that leaves more than this share of the strategies and pairs is the last of its kind.
_LEAST_SHRINK = 0.9


def squeeze(
    now: State, deadline: Deadline, *, additions_per_s: float = 1e8, most_additions: float = 1e9
) -> Generator[State]:
    """Yield a state after each round until the gap is closed, the goal is reached, or little more can be dropped.

    It also ends at the deadline. Tables that are not quick to eliminate are bounded by messages first, as long as that
    makes them smaller. The first price of memory is estimated from the known choices. One elimination takes at most
    `additions_per_s` for each second left (at least one second), and at most `most_additions`; a table that needs more
    is relaxed. InfeasibleError with the least memory that would do.
    """
    to_beat_s, table = now.goal.to_beat_s, now.reduced.table
    if now.best is not None and (around := around_limit(table, (now.best, *now.lowered))) is not None:
        now = replace(now, around=(now.reduced.lift(around[0]), now.reduced.lift(around[1])))
    limits = Limits(additions=min(additions_per_s * max(1.0, deadline.remaining_s), most_additions))
    messages_help = True
    for _ in range(_MOST_ROUNDS):
        view = _view(now.reduced.table, limits, try_messages=messages_help)
        enough_s = to_beat_s
        if now.best is not None:
            enough_s = min(to_beat_s, (1 - now.goal.gap) * cost_of(now.reduced.table, now.best))
        now, dual = _bounded(now, view, enough_s, deadline)
        yield now
        if is_solved(now) or now.lower_bound_s >= to_beat_s or deadline.is_past:
            return
        size = num_entries(now.reduced.table)
        if now.best is not None:
            pruned = _pruned(now, view, dual)
            is_quick = elimination_order(pruned.table, _quick(limits)) is not None
            is_reducible = not is_quick and num_entries(pruned.table) < _REDUCIBLE_ENTRIES
            now = replace(_moved(now, reduce(pruned) if is_reducible else pruned), is_pruned=True)
            yield now
        if now.best is None or num_entries(now.reduced.table) > _LEAST_SHRINK * size:
            if view.order is not None and (now.best is None or dual.is_best):
                return
            messages_help = False


@dataclass(frozen=True, eq=False)
class _RoundTable:
    """The table of a round, or its relaxation, with an elimination order; None: it is bounded by messages."""

    table: CostTable
    order: tuple[int, ...] | None
    is_slow: bool = False


def _quick(limits: Limits) -> Limits:
    return replace(limits, additions=min(limits.additions, QUICK.additions))


def _view(table: CostTable, limits: Limits, *, try_messages: bool) -> _RoundTable:
    if (order := elimination_order(table, _quick(limits))) is not None:
        return _RoundTable(table, order)
    if try_messages:
        return _RoundTable(table, None)
    relaxed, order = tractable(table, limits)
    return _RoundTable(relaxed, order, elimination_order(relaxed, replace(limits, additions=_SLOW_ADDITIONS)) is None)


def _bounded(now: State, view: _RoundTable, enough_s: float, deadline: Deadline) -> tuple[State, Dual]:
    """The state with the best bound for its table, and with the best choice from descents at the bound's prices."""
    table = now.reduced.table
    known = [now.best] if now.best is not None else _lightest(table, view, deadline)
    feasible = cheapest(table, known)
    is_rough = view.order is None
    evaluate = by_messages(feasible, deadline) if view.order is None else by_elimination(view.order)
    above = None if now.around is None else now.reduced.lower(now.around[0])
    tolerance = _ROUGH if is_rough else 0.0
    dual = maximise(
        view.table,
        evaluate,
        feasible=feasible,
        above=above,
        enough=Enough(tolerance, cost_s=enough_s, most_steps=8 if view.is_slow else 40),
        deadline=deadline,
    )
    if dual.bound_s == float("inf"):
        raise InfeasibleError("every choice is forbidden by some pair of nodes; remove a pin or a constraint")
    met = tuple(dict.fromkeys((*known, *dual.met, *now.lowered)))
    best = cheapest(table, met)
    if best is None or (dual.bound_s < enough_s and not is_closed(cost_of(table, best), dual.bound_s)):
        better = (
            combine(table, met, deadline=deadline) if is_rough else _descents(table, (*known, *dual.met), dual.price)
        )
        best = cheapest(table, (*better, *([] if best is None else [best])))
    bound_s = max(now.lower_bound_s, dual.bound_s)
    if best is not None:
        bound_s = proven(cost_of(table, best), bound_s, is_pruned=now.is_pruned)
    around = None if dual.around is None else now.lifted_pair(dual.around)
    met = tuple(now.reduced.lift(choice) for choice in met)
    return replace(now, best=best, lower_bound_s=bound_s, around=around, known=met), dual


def _descents(table: CostTable, choices: Sequence[tuple[int, ...]], price: float) -> list[tuple[int, ...]]:
    """The ends of descents from the choices with the least objectives at the price."""
    land = landscape(table)

    def objective(choice: tuple[int, ...]) -> float:
        return cost_of(table, choice) + (price * memory_of(table, choice) if price else 0.0)

    best = sorted(dict.fromkeys(choices), key=objective)[:_MOST_DESCENTS]
    return [descend(land, shed(land, choice, most_moves=MOST_SHED)) for choice in best]


def _lightest(table: CostTable, view: _RoundTable, deadline: Deadline) -> list[tuple[int, ...]]:
    """The choice of least memory, or a light one by messages; () without a memory limit.

    InfeasibleError if none fits.
    """
    limit = table.memory_limit_bytes
    if limit == float("inf"):
        return []
    if view.order is not None:
        least, lightest = least_memory(view.table, view.order)
    else:
        memory = replace(memory_only(table), memory_limit_bytes=float("inf"))
        passed = pass_messages(memory, deadline=deadline)
        least, lightest = passed.value, descend(landscape(memory), passed.met[0])
    least_known = memory_of(table, lightest)
    check_fits(least, least_known, limit)
    return [lightest]


def check_fits(least: float, least_known: float, limit: float) -> None:
    """InfeasibleError if the least memory of a choice, between the first two figures, is above `limit`."""
    if least > limit and least_known > limit:
        raise InfeasibleError(
            f"no choice fits in {limit:.0f} bytes ({limit / 2**30:.2f} GiB) per device: the least that would do is "
            f"{_between(least, least_known)}; raise the memory limit, or use more devices"
        )


def _between(least: float, least_found: float) -> str:
    """The text of the least memory, of which a lower bound and the memory of a choice are known."""
    if least >= least_found * (1 - TOLERANCE):
        return f"{least_found:.0f} bytes ({least_found / 2**30:.2f} GiB)"
    return f"between {least:.0f} and {least_found:.0f} bytes ({least / 2**30:.2f} and {least_found / 2**30:.2f} GiB)"


def _pruned(now: State, view: _RoundTable, dual: Dual) -> Reduced:
    """The table without strategies, and with pairs forbidden, whose best completion cannot beat the incumbent."""
    table = now.reduced.table
    best = now.incumbent
    cost_s = cost_of(table, best)
    threshold = cost_s - TOLERANCE * abs(cost_s) + dual.rebate_s
    marginals = _marginals(view, dual)
    kept = []
    for values, k in zip(marginals.nodes, best):
        stays = values < threshold
        stays[k] = True
        kept.append(np.flatnonzero(stays))
    edges = list(table.edges)
    for i, edge in enumerate(edges):
        if (edge.a, edge.b) in marginals.pairs:
            stays = marginals.pairs[edge.a, edge.b] < threshold
            stays[best[edge.a], best[edge.b]] = True
            edges[i] = Edge(
                edge.a, edge.b, np.where(stays, edge.cost_s, np.inf), np.where(stays, edge.memory_bytes, 0.0)
            )
    return restrict(replace(now.reduced, table=replace(table, edges=tuple(edges))), kept)


def _marginals(view: _RoundTable, dual: Dual) -> Marginals:
    source = dual.step.source
    if not isinstance(source, Elimination):
        assert source is not None, "prices were evaluated by messages"
        return Marginals(source.marginals, {})
    return min_marginals(
        source, frozenset() if view.is_slow else frozenset((edge.a, edge.b) for edge in view.table.edges)
    )


def _moved(now: State, reduced: Reduced) -> State:
    """The state in terms of a further reduced table."""
    best = None if now.best is None else reduced.lower(now.reduced.lift(now.best))
    return replace(now, reduced=reduced, best=best)
