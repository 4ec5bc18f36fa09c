"""`price_memory`: the Lagrangian bound of a memory limit, each price evaluated by a search of the core.

At a price of memory the limit is gone, and a table without one is searched on its core, in a tenth of the nodes. So the
best price, and choices on both sides of the limit, are known before the whole table is searched.
"""

from collections.abc import Generator, Iterable
from dataclasses import replace

from autopar.search.bounds.combine import combine
from autopar.search.bounds.lagrange import Enough, Evaluate, PricedBound, around_limit, maximise, memory_only
from autopar.search.bounds.squeeze import MOST_SHED, check_fits, squeeze
from autopar.search.coordinate_descent import descend, descend_from_known, landscape, shed
from autopar.search.deadline import Deadline
from autopar.search.min_plus.eliminate import Limits, elimination_order
from autopar.search.min_plus.sparse_core import core
from autopar.search.search_state import State, beginning, cheapest, is_solved, proven, with_known
from autopar.search.table import CostTable, Edge, Node, cost_of, memory_of

# The precision of the best price's bound, as a share of the gap at which a search ends.
_SHARE_OF_GAP = 0.02


def price_memory(state: State, deadline: Deadline, *, quick: Limits) -> Generator[State]:
    """Yield the state with the bound at the best price, and with the best choice that those met on the way and descents
    from the two around the limit hold between them.

    It yields nothing without a memory limit, or for a table whose elimination is within `quick`, of which `squeeze` has
    the same in less time. InfeasibleError with the least memory that would do.
    """
    table, to_beat_s = state.reduced.table, state.goal.to_beat_s
    if table.memory_limit_bytes == float("inf") or elimination_order(table, quick) is not None:
        return
    starts = state.lowered
    feasible = cheapest(table, starts) or _light(table, starts, deadline)
    if feasible is None:
        return
    above, _ = around_limit(table, (feasible, *starts)) or (None, feasible)
    dual = maximise(
        table,
        _by_core(starts, deadline),
        feasible=feasible,
        above=above,
        enough=Enough(precision=_SHARE_OF_GAP * state.goal.gap, cost_s=to_beat_s),
        deadline=deadline,
    )
    if dual.around is not None:
        state = replace(state, around=state.lifted_pair(dual.around))
    met = (feasible, *dual.met)
    if dual.bound_s < to_beat_s:
        land = landscape(table)
        met += tuple(descend(land, shed(land, choice, most_moves=MOST_SHED)) for choice in dual.around or ())
        met += combine(table, met, deadline=deadline)
    state = with_known(state, met)
    bound_s = max(state.lower_bound_s, dual.bound_s)
    yield replace(state, lower_bound_s=proven(cost_of(table, state.incumbent), bound_s, is_pruned=state.is_pruned))


def _by_core(starts: Iterable[tuple[int, ...]], deadline: Deadline) -> Evaluate:
    def evaluate(table: CostTable, price: float, before: PricedBound | None) -> PricedBound:
        known = (*(before.met if before is not None else ()), *starts)
        value, choice = _least(_priced(table, price), known, deadline)
        return PricedBound(value, (choice,), None)

    return evaluate


def _priced(table: CostTable, price: float) -> CostTable:
    """The table without a limit whose costs include the price of memory."""
    nodes = tuple(Node(node.name, node.cost_s + price * node.memory_bytes, node.memory_bytes) for node in table.nodes)
    edges = tuple(Edge(e.a, e.b, e.cost_s + price * e.memory_bytes, e.memory_bytes) for e in table.edges)
    return CostTable(nodes, edges)


def _least(table: CostTable, known: Iterable[tuple[int, ...]], deadline: Deadline) -> tuple[float, tuple[int, ...]]:
    """(lower bound, choice) of a table without a limit."""
    small = core(table)
    (state,) = descend_from_known(beginning(small.table, map(small.lower, known)), deadline, most_descents=3)
    if not is_solved(state):
        *_, state = state, *squeeze(state, deadline)
    return state.lower_bound_s, small.lift(state.reduced.lift(state.incumbent))


def _light(table: CostTable, known: Iterable[tuple[int, ...]], deadline: Deadline) -> tuple[int, ...] | None:
    """A choice within the limit; None if none was found in time. InfeasibleError if there is none."""
    least, lightest = _least(replace(memory_only(table), memory_limit_bytes=float("inf")), known, deadline)
    most = memory_of(table, lightest)
    check_fits(least, most, table.memory_limit_bytes)
    return lightest if most <= table.memory_limit_bytes else None
