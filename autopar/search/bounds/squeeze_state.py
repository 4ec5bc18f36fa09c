"""What is known of a table while it is squeezed: what is left of it, the best choice, and the bound."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopar.search.bounds.prune import Reduced
from autopar.search.table import CostTable, cost_of, memory_of

# What cannot beat the best choice by more than this part of its cost is dropped; proven bounds stay below the best by
# as much.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Squeezed:
    """What is left of a table: every choice that beats `best` lies in `reduced`, and none costs less than
    `lower_bound_s`.

    `best` is in terms of `reduced.table`, None as long as no choice within the limit is known. `around`: in terms of
    the whole table, two choices, above the limit and within it, of equal cost at the price that gives the bound; None
    where the limit does not bind. `met`: choices of the whole table that are good for something, if only to be
    combined.
    """

    reduced: Reduced
    best: tuple[int, ...] | None
    lower_bound_s: float
    is_pruned: bool = False
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    met: tuple[tuple[int, ...], ...] = ()


def trivial_bound(table: CostTable) -> float:
    """Each node and edge at its least."""
    return sum(float(part.cost_s.min()) for part in (*table.nodes, *table.edges))


def is_solved(state: Squeezed) -> bool:
    """Whether the best choice is proven to be one."""
    return state.best is not None and is_closed(cost_of(state.reduced.table, state.best), state.lower_bound_s)


def proven(cost_s: float, lower_bound_s: float, *, is_pruned: bool) -> float:
    """What a lower bound on what is left proves about the whole table: pruning has dropped what is better by less than
    the tolerance.
    """
    return min(lower_bound_s, cost_s - TOLERANCE * abs(cost_s) if is_pruned else cost_s)


def num_entries(table: CostTable) -> int:
    """Strategies and allowed pairs."""
    return sum(node.cost_s.size for node in table.nodes) + sum(
        int(np.isfinite(edge.cost_s).sum()) for edge in table.edges
    )


def cheapest(table: CostTable, choices: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The cheapest choice within the limit, the first of equals; None when there is none."""
    within = [
        c for c in choices if memory_of(table, c) <= table.memory_limit_bytes and cost_of(table, c) < float("inf")
    ]
    return min(within, key=lambda c: cost_of(table, c), default=None)


def is_closed(cost_s: float, lower_bound_s: float) -> bool:
    """Whether the bound is as near to the cost as this package ever brings it."""
    return cost_s - lower_bound_s <= 5 * TOLERANCE * abs(cost_s)
