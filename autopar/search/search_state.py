"""`State`: the pruned table, the incumbent and the lower bound of a search, which solvers improve."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autopar.search.bounds.prune import Reduced, unreduced
from autopar.search.deadline import Deadline
from autopar.search.table import CostTable, cost_of, memory_of

# Strategies that cannot beat the incumbent by more than this share of its cost are dropped; proven bounds stay below
# the incumbent by as much.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Goal:
    """The goal of a search: a lower bound of `to_beat_s` seconds, or a relative `gap` to the incumbent."""

    to_beat_s: float = float("inf")
    gap: float = 0.0


@dataclass(frozen=True)
class State:
    """The state of a search: every choice that beats the incumbent `best` lies in `reduced`.

    No choice costs less than `lower_bound_s`. `best`: in terms of `reduced.table`; None if no choice within the limit
    is known. `around`: two choices of the whole table, above the limit and within it, with equal objectives at the
    price that gives the bound; None if the limit does not bind. `known`: incumbents and other choices of the whole
    table kept for recombination, possibly above the limit.
    """

    reduced: Reduced
    best: tuple[int, ...] | None
    lower_bound_s: float
    is_pruned: bool = False
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    known: tuple[tuple[int, ...], ...] = ()
    goal: Goal = Goal()

    @property
    def incumbent(self) -> tuple[int, ...]:
        """`best`, where one is known."""
        assert self.best is not None, "no choice within the limit is known yet"
        return self.best

    def lifted_pair(self, pair: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two choices of `reduced.table` in terms of the whole table."""
        return self.reduced.lift(pair[0]), self.reduced.lift(pair[1])

    @property
    def lowered(self) -> tuple[tuple[int, ...], ...]:
        """The known choices that `reduced.table` still has, in its terms."""
        return tuple(small for choice in self.known if (small := self.reduced.lower(choice)) is not None)


class Solver(Protocol):
    """A part of the search, which yields states that are each at least as good as `state`, or nothing.

    A yielded state has an incumbent that costs no more, a lower bound that is no lower, or a smaller table. The solver
    ends when the goal is reached or, soon, after the deadline. The same state gives the same states unless the deadline
    comes first. InfeasibleError if no choice is within the limit.
    """

    def __call__(self, state: State, deadline: Deadline, /) -> Generator[State]: ...


def beginning(table: CostTable, known: Iterable[tuple[int, ...]] = (), goal: Goal = Goal()) -> State:
    """The state of a checked table before any search."""
    return State(unreduced(table), None, trivial_bound(table), known=tuple(known), goal=goal)


def with_known(state: State, choices: Iterable[tuple[int, ...]]) -> State:
    """The state with these further known `choices` of `reduced.table`; the first of the cheapest is the incumbent."""
    choices = tuple(choices)
    best = cheapest(state.reduced.table, (*choices, *(() if state.best is None else (state.best,))))
    known = dict.fromkeys((*map(state.reduced.lift, choices), *state.known))
    return replace(state, best=best, known=tuple(known))


def trivial_bound(table: CostTable) -> float:
    """The sum of the least costs of all nodes and edges, a lower bound."""
    return sum(float(part.cost_s.min()) for part in (*table.nodes, *table.edges))


def is_solved(state: State) -> bool:
    """Whether the incumbent is proven optimal."""
    return state.best is not None and is_closed(cost_of(state.reduced.table, state.best), state.lower_bound_s)


def proven(cost_s: float, lower_bound_s: float, *, is_pruned: bool) -> float:
    """The lower bound of the whole table that follows from one of the pruned table.

    Pruning may have dropped choices that are better than the incumbent by less than the tolerance.
    """
    return min(lower_bound_s, cost_s - TOLERANCE * abs(cost_s) if is_pruned else cost_s)


def num_entries(table: CostTable) -> int:
    """The number of strategies and allowed pairs of a table."""
    return sum(node.cost_s.size for node in table.nodes) + sum(
        int(np.isfinite(edge.cost_s).sum()) for edge in table.edges
    )


def cheapest(table: CostTable, choices: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The cheapest of `choices` within the limit, the first of equals; None if there is none."""
    within = [
        c for c in choices if memory_of(table, c) <= table.memory_limit_bytes and cost_of(table, c) < float("inf")
    ]
    return min(within, key=lambda c: cost_of(table, c), default=None)


def is_closed(cost_s: float, lower_bound_s: float) -> bool:
    """Whether the bound equals the cost up to the tolerance of pruning."""
    return cost_s - lower_bound_s <= 5 * TOLERANCE * abs(cost_s)
