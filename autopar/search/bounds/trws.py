"""A lower bound, nearly always tight, from passing messages along edges: no factor is ever larger than an edge.

Sequential tree-reweighted message passing (V. Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", 2006). The objective is split over chains of edges that run through the nodes in ascending order,
max(edges from below, edges from above) of them through a node; messages move costs between the chains so that the sum
of their minima, a lower bound, never falls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.bounds.edge_classes import Classes, Compact, compacted
from autopar.search.deadline import NEVER, Deadline
from autopar.search.table import CostTable, cost_of, memory_of

# The share of the objective that rounding may have added to a bound: some hundred terms, each with a relative error of
# 2^-53.
_ROUNDING = 1e-13
# A choice with this relative gap to the bound counts as optimal.
_CLOSED = 1e-12
# The pass stops when this number of sweeps together closed less than this share of the gap to the best choice visited.
_PATIENCE, _LEAST_PROGRESS = 6, 0.02


@dataclass(frozen=True, eq=False)
class Passed:
    """The result of a message pass: no choice has a lower objective than `value`.

    `marginals[v][k]`: no choice that takes strategy k at node v has a lower objective than this. `met`: choices
    visited, best objective first. `edges` and `messages`: from which a pass at another price may begin.
    """

    value: float
    marginals: tuple[np.ndarray, ...]
    met: tuple[tuple[int, ...], ...]
    edges: tuple[Compact, ...]
    messages: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class _Half:
    """An edge seen from one of its ends: cost + price * memory by classes, f64[classes of here, classes of there]."""

    here: int
    there: int
    values: np.ndarray
    of_here: Classes
    of_there: Classes
    reverse: int  # index of this edge seen from the other end


@dataclass(frozen=True, eq=False)
class _Field:
    """The objective: a term for each node, and both halves of each edge.

    `earlier`, `later`: for each node its halves that lead to earlier and to later nodes.
    """

    nodes: tuple[np.ndarray, ...]
    halves: tuple[_Half, ...]
    earlier: tuple[tuple[int, ...], ...]
    later: tuple[tuple[int, ...], ...]


def pass_messages(
    table: CostTable,
    *,
    multiplier: float = 0.0,
    known: Sequence[tuple[int, ...]] = (),
    ceiling: float = float("inf"),
    most_sweeps: int = 60,
    deadline: Deadline = NEVER,
    before: Passed | None = None,
) -> Passed:
    """A lower bound of cost + multiplier * memory (seconds, and seconds a byte), by message passing.

    The memory limit itself is ignored. `known`: choices to compare with. `ceiling`: objectives above it are not told
    apart. It stops when the bound reaches the objective of a choice, when it no longer rises, or at `deadline`, but not
    before one sweep. `before`: the pass at another price of the same table. The bound holds for any initial messages:
    they move costs between terms and chains and add none.
    """

    def objective(choice: tuple[int, ...]) -> float:
        return cost_of(table, choice) + multiplier * memory_of(table, choice)

    edges = compacted(table) if before is None else before.edges
    field = _field(table, edges, multiplier, ceiling)
    # messages[h]: into the node `here` of half h
    messages = (
        [np.zeros(field.nodes[half.here].size) for half in field.halves] if before is None else list(before.messages)
    )
    marginals = [np.full(node.size, -np.inf) for node in field.nodes]
    bounds: list[float] = []
    met = {choice: objective(choice) for choice in known}
    best = min(met.values(), default=float("inf"))
    while len(bounds) < most_sweeps and not (bounds and (_stands_still(bounds, best) or deadline.is_past)):
        choice = _forward(field, messages)
        met.setdefault(choice, objective(choice))
        best = min(best, met[choice])
        bounds.append(_backward(field, messages, marginals, bounds[-1] if bounds else -np.inf))
    slack = _ROUNDING * abs(bounds[-1])
    ranked = sorted((value, i, choice) for i, (choice, value) in enumerate(met.items()))
    lowered = tuple(values - slack for values in marginals)
    return Passed(max(bounds) - slack, lowered, tuple(choice for _, _, choice in ranked), edges, tuple(messages))


def _stands_still(bounds: Sequence[float], best: float) -> bool:
    gap = best - bounds[-1]
    if gap <= _CLOSED * abs(best):
        return True
    return len(bounds) > _PATIENCE and bounds[-1] - bounds[-1 - _PATIENCE] < _LEAST_PROGRESS * min(gap, abs(bounds[-1]))


def _field(table: CostTable, compact: Sequence[Compact], multiplier: float, ceiling: float) -> _Field:
    """The objective with each term capped where it alone lifts a choice above the ceiling: a relaxation without inf."""
    nodes = [node.cost_s + multiplier * node.memory_bytes for node in table.nodes]
    edges = [edge.cost_s + multiplier * edge.memory_bytes for edge in compact]
    room = _room((*nodes, *edges), ceiling)
    halves: list[_Half] = []
    for edge, values in zip(compact, (_cut(values, room) for values in edges)):
        number = len(halves)
        halves.append(_Half(edge.a, edge.b, values, edge.of_a, edge.of_b, number + 1))
        halves.append(_Half(edge.b, edge.a, np.ascontiguousarray(values.T), edge.of_b, edge.of_a, number))
    earlier: list[list[int]] = [[] for _ in nodes]
    later: list[list[int]] = [[] for _ in nodes]
    for number, half in enumerate(halves):
        (later if half.there > half.here else earlier)[half.here].append(number)
    return _Field(
        tuple(_cut(values, room) for values in nodes),
        tuple(halves),
        tuple(map(tuple, earlier)),
        tuple(map(tuple, later)),
    )


def _room(terms: Sequence[np.ndarray], ceiling: float) -> float:
    """The largest excess of a term over its least in a choice below the ceiling, and a little more."""
    finite = [finite for term in terms if (finite := term[np.isfinite(term)]).size]
    if np.isinf(ceiling):
        ceiling = sum(float(term.max()) for term in finite)
    return 1.01 * (ceiling - sum(float(term.min()) for term in finite)) + 1e-6 * abs(ceiling) + 1e-300


def _cut(values: np.ndarray, room: float) -> np.ndarray:
    least = values.min()
    return np.minimum(values, (least if np.isfinite(least) else 0.0) + room)


def _forward(field: _Field, messages: list[np.ndarray]) -> tuple[int, ...]:
    """Send messages to later nodes; returns the choice made on the way.

    It takes each node's best strategy given those of earlier nodes and the messages from later ones.
    """
    choice: list[int] = []
    for v, own in enumerate(field.nodes):
        from_later = own + sum(messages[number] for number in field.later[v])
        total = from_later + sum(messages[number] for number in field.earlier[v])
        given = from_later
        for half in (field.halves[number] for number in field.earlier[v]):
            given = given + half.of_here.spread(half.values[:, half.of_there.index[choice[half.there]]])
        choice.append(int(given.argmin()))
        _send(field, messages, v, total, field.later[v])
    return tuple(choice)


def _backward(field: _Field, messages: list[np.ndarray], marginals: list[np.ndarray], before: float) -> float:
    """Send messages to earlier nodes; returns the bound, the sum of the amounts by which the terms were lowered.

    `before`: the bound of the last sweep, below which no chain has fallen since. When the sweep reaches a node, each
    chain through it has its least cost for each strategy, up to a constant; their sum is the node's total (section 3.2
    of the paper). So a choice that takes strategy k costs at least `before` + total[k] - min total.
    """
    bound = 0.0
    for v in reversed(range(len(field.nodes))):
        total = field.nodes[v] + sum(messages[number] for number in (*field.earlier[v], *field.later[v]))
        least = float(total.min())
        total = total - least
        np.maximum(marginals[v], before + total, out=marginals[v])
        bound += least + _send(field, messages, v, total, field.earlier[v])
    return bound


def _send(field: _Field, messages: list[np.ndarray], v: int, total: np.ndarray, halves: Sequence[int]) -> float:
    """Send v's share of its total along the given halves; returns the sum by which the messages were lowered."""
    share = 1.0 / max(1, len(field.earlier[v]), len(field.later[v]))
    lowered = 0.0
    for number in halves:
        half = field.halves[number]
        sent = half.of_here.least(share * total - messages[number])
        received = (field.halves[half.reverse].values + sent).min(axis=1)
        least = float(received.min())
        messages[half.reverse] = half.of_there.spread(received - least)
        lowered += least
    return lowered
