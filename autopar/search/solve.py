"""The search in one function: descend, bound, close, refine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.search.bounds.close_gap import close
from autopar.search.bounds.combine import combine
from autopar.search.bounds.squeeze import squeeze
from autopar.search.bounds.squeeze_state import Squeezed, cheapest, is_solved, num_entries, proven, trivial_bound
from autopar.search.check_table import checked
from autopar.search.coordinate_descent import descend, landscape, own_starts
from autopar.search.cp_sat.refine import WORKER, refine
from autopar.search.deadline import NEVER, Deadline
from autopar.search.min_plus.sparse_core import core
from autopar.search.table import Choice, CostTable, cost_of, memory_of

# What one elimination may take: about a twentieth of the time limit, at 2e9 additions a second, and no more than half a
# second.
_ADDITIONS_PER_S, _MOST_ADDITIONS = 1e8, 1e9
# CP-SAT is given a table of at most so many strategies and allowed pairs: it builds a variable for each.
_MOST_VARIABLES = 500_000

# A table of fewer strategies and pairs is bounded as well as any price can in a few hundredths of a second.
_FEW_ENTRIES = 1e5

# What bounds a table meets better choices than further descents do.
_MOST_DESCENTS = 3

Progress = Callable[[str, float, float], None]


def solve(
    table: CostTable,
    *,
    starts: Sequence[tuple[int, ...]] = (),
    deadline: Deadline = NEVER,
    enough_gap: float = 0.0,
    is_brief: bool = False,
    to_beat_s: float = float("inf"),
    progress: Progress | None = None,
    worker: Sequence[str] = WORKER,
) -> Choice:
    """The cheapest choice within the memory limit, and a proven lower bound.

    Never worse than any start within the limit. The same table and starts give the same choice, unless the deadline
    comes first; after it the cheapest start within the limit is returned as it is. `enough_gap`: a search under a
    binding limit ends when the choice is so near to its bound, relatively, unless nearer comes at once. `to_beat_s`: it
    also ends when no choice can cost less than this. `is_brief`: or when the limit is seen to bind and about the best
    price on memory gives a bound and the choices `around` the limit. `progress(stage, cost_s, lower_bound_s)` is called
    at each improvement; `worker` is the command that runs CP-SAT. Raises `InfeasibleError` with the least memory that
    would do, `ValueError` for a malformed table.
    """
    table = checked(table)
    _check_starts(table, starts)
    if deadline.is_past:
        return _without_search(table, starts)
    best, is_small = None, num_entries(table) < _FEW_ENTRIES
    find = _choices_of_core if table.memory_limit_bytes == float("inf") else _choices
    enough = _Enough(to_beat_s, 0.0 if is_small else enough_gap)
    with closing(find(table, starts, enough, deadline, worker)) as choices:
        for stage, choice in choices:
            if best is None or (choice.cost_s, -choice.lower_bound_s) < (best.cost_s, -best.lower_bound_s):
                best = choice
                if progress is not None:
                    progress(stage, best.cost_s, best.lower_bound_s)
            is_enough = is_brief or (best.gap <= enough_gap and not (is_small and stage == "bound"))
            if best.lower_bound_s >= to_beat_s or (choice.around is not None and is_enough):
                break
    if best is None:
        raise _out_of_time(table)
    return best


def _without_search(table: CostTable, starts: Sequence[tuple[int, ...]]) -> Choice:
    """The cheapest start within the limit."""
    start = cheapest(table, starts)
    if start is None:
        raise _out_of_time(table)
    return _choice(table, start, trivial_bound(table))


def _out_of_time(table: CostTable) -> InfeasibleError:
    limit = f"{table.memory_limit_bytes:.0f} bytes per device"
    return InfeasibleError(f"no choice within {limit} was found in the time there was; allow more time or memory")


@dataclass(frozen=True)
class _Enough:
    """No bound need be higher than `to_beat_s`, or nearer to the best choice than `gap`."""

    to_beat_s: float
    gap: float


def _choices_of_core(
    table: CostTable, starts: Sequence[tuple[int, ...]], enough: _Enough, deadline: Deadline, worker: Sequence[str]
) -> Iterator[tuple[str, Choice]]:
    """The same for a table without a limit, by way of its core."""
    small = core(table)
    with closing(_choices(small.table, [small.lower(start) for start in starts], enough, deadline, worker)) as choices:
        for stage, found in choices:
            yield stage, _choice(table, small.lift(found.strategies), found.lower_bound_s)


def _choices(
    table: CostTable, starts: Sequence[tuple[int, ...]], enough: _Enough, deadline: Deadline, worker: Sequence[str]
) -> Iterator[tuple[str, Choice]]:
    """Choices and bounds as they are found, with the stage that found them."""
    land = landscape(table)
    known = (*starts, *(descend(land, start) for start in _promising(table, (*starts, *own_starts(land)))))
    if table.memory_limit_bytes < float("inf"):
        known = (*combine(table, known, deadline=deadline), *known)
    best = cheapest(table, known)
    if best is not None:
        yield "descent", _choice(table, best, trivial_bound(table))
    additions = min(_ADDITIONS_PER_S * max(1.0, deadline.remaining_s), _MOST_ADDITIONS)
    for state in squeeze(
        table,
        best,
        known=known,
        to_beat_s=enough.to_beat_s,
        enough_gap=enough.gap,
        additions=additions,
        deadline=deadline,
    ):
        if state.best is not None:
            yield "bound", _of_state(table, state)
    if not is_solved(state):
        squeezed = state
        for state in close(squeezed, deadline=deadline):
            yield "labels", _of_state(table, state)
    if is_solved(state) or num_entries(state.reduced.table) > _MOST_VARIABLES or deadline.is_past:
        return
    for found in refine(state.reduced.table, state.best, state.lower_bound_s, deadline=deadline, worker=worker):
        bound_s = proven(found.cost_s, found.lower_bound_s, is_pruned=state.is_pruned)
        yield "refine", replace(_choice(table, state.reduced.lift(found.strategies), bound_s), around=state.around)


def _promising(table: CostTable, starts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those worth descending from: within the limit the cheapest first, above it the lightest."""

    def rank(start: tuple[int, ...]) -> tuple[float, float]:
        excess = max(0.0, memory_of(table, start) - table.memory_limit_bytes)
        return excess, cost_of(table, start)

    return sorted(dict.fromkeys(starts), key=rank)[:_MOST_DESCENTS]


def _of_state(table: CostTable, state: Squeezed) -> Choice:
    return replace(_choice(table, state.reduced.lift(state.best), state.lower_bound_s), around=state.around)


def _choice(table: CostTable, strategies: tuple[int, ...], lower_bound_s: float) -> Choice:
    cost_s = cost_of(table, strategies)
    return Choice(strategies, cost_s, memory_of(table, strategies), min(lower_bound_s, cost_s))


def _check_starts(table: CostTable, starts: Sequence[tuple[int, ...]]) -> None:
    sizes = [node.cost_s.size for node in table.nodes]
    for start in starts:
        if len(start) != len(sizes) or not all(0 <= k < size for k, size in zip(start, sizes)):
            raise ValueError(f"start {start}: expected one strategy index a node, below {sizes}")
