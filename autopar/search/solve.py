"""`solve`: the search of a cost table by `SOLVERS`, one after the other, each on the last state of the previous one."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from autopar.errors import InfeasibleError
from autopar.search.bounds.close_gap import close
from autopar.search.bounds.combine import recombine
from autopar.search.bounds.lagrange import memory_only
from autopar.search.bounds.price_memory import price_memory
from autopar.search.bounds.squeeze import QUICK, squeeze
from autopar.search.check_table import checked
from autopar.search.coordinate_descent import descend_from_known
from autopar.search.cp_sat.refine import refine
from autopar.search.deadline import NEVER, Deadline
from autopar.search.min_plus.sparse_core import core
from autopar.search.search_state import Goal, Solver, State, beginning, cheapest, is_solved, num_entries, trivial_bound
from autopar.search.table import Choice, CostTable, cost_of, memory_of

# A table of fewer strategies and pairs gets the best Lagrangian bound in a few hundredths of a second.
_FEW_ENTRIES = 1e5


@dataclass(frozen=True)
class Row:
    """A solver with its name in progress reports."""

    name: str
    solve: Solver


# In the order in which they run, until the gap is closed. The lower bounds meet better choices than further descents
# do. One elimination takes about a twentieth of the time limit, at 2e9 additions a second, and no more than half a
# second.
SOLVERS = (
    Row("prices", partial(price_memory, quick=QUICK)),
    Row("descent", partial(descend_from_known, most_descents=3)),
    Row("recombination", recombine),
    Row("bound", partial(squeeze, additions_per_s=1e8, most_additions=1e9)),
    Row("labels", close),
    Row("refine", partial(refine, most_variables=500_000)),
)

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
    solvers: Sequence[Row] = SOLVERS,
) -> Choice:
    """The cheapest choice within the memory limit, and a proven lower bound.

    It is never worse than any of `starts` within the limit. The same table and starts give the same choice unless the
    deadline comes first; a call after the deadline returns the cheapest start within the limit. Where no start is
    allowed, a choice is looked for all the same.

    `enough_gap`: under a binding limit, the search ends at this relative gap; a small table is closed further.
    `to_beat_s`: the search also ends when no choice can cost less than this. `is_brief`: it also ends when the limit is
    known to bind, with the bound at about the best price on memory and the choices `around` the limit. `progress(stage,
    cost_s, lower_bound_s)` is called at each improvement; `stage` is the name of one of the `solvers`.

    InfeasibleError with the least memory that would do, ValueError for a malformed table.
    """
    table = checked(table)
    _check_starts(table, starts)
    if deadline.is_past:
        return _without_search(table, starts)
    best, is_closed = None, is_small(table)
    find = _choices_of_core if table.memory_limit_bytes == float("inf") else _choices
    goal = Goal(to_beat_s, 0.0 if is_closed else enough_gap)
    with closing(find(table, starts, goal, deadline, solvers)) as choices:
        for stage, choice in choices:
            if best is None or (choice.cost_s, -choice.lower_bound_s) < (best.cost_s, -best.lower_bound_s):
                best = choice
                if progress is not None:
                    progress(stage, best.cost_s, best.lower_bound_s)
            is_enough = is_brief or (best.gap <= enough_gap and not (is_closed and stage == "bound"))
            if best.lower_bound_s >= to_beat_s or (choice.around is not None and is_enough):
                break
    return _without_search(table, starts) if best is None else best


def is_small(table: CostTable) -> bool:
    """Whether a search of the table takes some tenths of a second, so that its gap is closed."""
    return num_entries(table) < _FEW_ENTRIES


def _without_search(table: CostTable, starts: Sequence[tuple[int, ...]]) -> Choice:
    """The cheapest start within the limit or, if each of them is forbidden, the first choice that is met of low cost
    or, if that is above the limit, of low memory; InfeasibleError if that is above it too.
    """
    start = cheapest(table, starts)
    if start is None and all(cost_of(table, one) == float("inf") for one in starts):
        within = (choice for part in (table, memory_only(table)) for choice in _first_without_limit(part))
        start = next((choice for choice in within if cheapest(table, (choice,)) is not None), None)
    if start is None:
        limit = f"{table.memory_limit_bytes:.0f} bytes per device"
        raise InfeasibleError(f"no choice within {limit} was found in the time limit; allow more time or memory")
    return _choice(table, start, trivial_bound(table))


def _first_without_limit(table: CostTable) -> Iterator[tuple[int, ...]]:
    """The first choice that is met without regard to memory, if there is one."""
    free = replace(table, memory_limit_bytes=float("inf"))
    with closing(_choices_of_core(free, (), Goal(), Deadline.after(0.0), SOLVERS)) as choices:
        for _, choice in islice(choices, 1):
            yield choice.strategies


def _choices_of_core(
    table: CostTable, starts: Sequence[tuple[int, ...]], goal: Goal, deadline: Deadline, solvers: Sequence[Row]
) -> Generator[tuple[str, Choice]]:
    """`_choices` for a table without a memory limit, searched on its core."""
    small = core(table)
    lowered = [small.lower(start) for start in starts]
    with closing(_choices(small.table, lowered, goal, deadline, solvers)) as choices:
        for stage, choice in choices:
            yield stage, _choice(table, small.lift(choice.strategies), choice.lower_bound_s)


def _choices(
    table: CostTable, starts: Sequence[tuple[int, ...]], goal: Goal, deadline: Deadline, solvers: Sequence[Row]
) -> Generator[tuple[str, Choice]]:
    """The incumbent and the bound after each step, with the name of the solver."""
    state = beginning(table, starts, goal)
    for row in solvers:
        with closing(row.solve(state, deadline)) as states:
            for state in states:
                if state.best is not None:
                    yield row.name, _of_state(table, state)
        if is_solved(state):
            return


def _of_state(table: CostTable, state: State) -> Choice:
    return replace(_choice(table, state.reduced.lift(state.incumbent), state.lower_bound_s), around=state.around)


def _choice(table: CostTable, strategies: tuple[int, ...], lower_bound_s: float) -> Choice:
    cost_s = cost_of(table, strategies)
    return Choice(strategies, cost_s, memory_of(table, strategies), min(lower_bound_s, cost_s))


def _check_starts(table: CostTable, starts: Sequence[tuple[int, ...]]) -> None:
    sizes = [node.cost_s.size for node in table.nodes]
    for start in starts:
        if len(start) != len(sizes) or not all(0 <= k < size for k, size in zip(start, sizes)):
            raise ValueError(f"start {start}: expected one strategy index a node, below {sizes}")
