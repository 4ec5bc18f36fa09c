"""Coordinate descent: moves of one node, or of two neighbours, to their best strategies until no move helps."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.deadline import Deadline
from autopar.search.search_state import State, with_known
from autopar.search.table import CostTable, cost_of, memory_of

# A move must save at least this share of the terms that it changes, so that rounding cannot keep the descent going.
_LEAST_GAIN = 1e-12


@dataclass(frozen=True, eq=False)
class Incidence:
    """An edge seen from one of its ends: `cost[k, other's strategy]`, memory likewise."""

    other: int
    cost: np.ndarray
    memory: np.ndarray


@dataclass(frozen=True, eq=False)
class Landscape:
    """A table prepared for descent: a forbidden entry costs, and takes, more than all allowed entries together.

    A finite number in place of `inf` lets a descent leave a forbidden start by the same comparisons.
    """

    table: CostTable
    cost: tuple[np.ndarray, ...]
    memory: tuple[np.ndarray, ...]
    incident: tuple[tuple[Incidence, ...], ...]
    groups: tuple[tuple[int, ...], ...]  # nodes that move together: single nodes first, then the ends of each edge
    member_of: tuple[tuple[tuple[int, ...], ...], ...]  # for each node its groups


def landscape(table: CostTable) -> Landscape:
    """The `Landscape` of a checked table."""
    parts = (*table.nodes, *table.edges)
    cost_wall = 1e3 * sum(_largest(part.cost_s) for part in parts) or 1.0
    limited = np.isfinite(table.memory_limit_bytes)
    memory_wall = (
        1e3 * (sum(_largest(part.memory_bytes) for part in parts) + abs(table.memory_limit_bytes)) if limited else 0.0
    )
    walls = [(_walled(p.cost_s, p.cost_s, cost_wall), _walled(p.memory_bytes, p.cost_s, memory_wall)) for p in parts]
    incident: list[list[Incidence]] = [[] for _ in table.nodes]
    for edge, (cost, memory) in zip(table.edges, walls[len(table.nodes) :]):
        incident[edge.a].append(Incidence(edge.b, cost, memory))
        incident[edge.b].append(Incidence(edge.a, np.ascontiguousarray(cost.T), np.ascontiguousarray(memory.T)))
    nodes = walls[: len(table.nodes)]
    groups = (*((v,) for v in range(len(nodes))), *((edge.a, edge.b) for edge in table.edges))
    member_of = tuple(((v,), *(tuple(sorted((v, i.other))) for i in incident[v])) for v in range(len(nodes)))
    return Landscape(
        table, tuple(c for c, _ in nodes), tuple(m for _, m in nodes), tuple(map(tuple, incident)), groups, member_of
    )


def descend_from_known(state: State, deadline: Deadline, *, most_descents: int) -> Generator[State]:
    """Yield the state with the ends of descents from its most promising known choices and from a few cheap starts."""
    land, known = landscape(state.reduced.table), state.lowered
    promising = _promising(land.table, (*known, *own_starts(land)))[:most_descents]
    yield with_known(state, (*known, *(descend(land, start) for start in promising)))


def _promising(table: CostTable, starts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The starts, the most promising first: the cheapest within the limit, then the lightest above it."""

    def rank(start: tuple[int, ...]) -> tuple[float, float]:
        excess = max(0.0, memory_of(table, start) - table.memory_limit_bytes)
        return excess, cost_of(table, start)

    return sorted(dict.fromkeys(starts), key=rank)


def descend(land: Landscape, start: Sequence[int]) -> tuple[int, ...]:
    """A choice, from `start`, that no move of one node or of two neighbours improves.

    Better means less memory above the limit, then less cost.
    """
    current = list(start)
    used = _memory_used(land, current)
    settled: set[tuple[int, ...]] = set()
    has_room_changed = False
    while len(settled) < len(land.groups):
        for group in land.groups:
            if group in settled:
                continue
            settled.add(group)
            moved = _best_move(land, current, group, used)
            if moved is None:
                continue
            touched = {v for v, k in zip(group, moved) if current[v] != k}
            for v, k in zip(group, moved):
                current[v] = k
            used = _memory_used(land, current)
            settled -= _dependent(land, touched) - {group}
            has_room_changed = np.isfinite(land.table.memory_limit_bytes)
        # A move changes the costs of neighbours only, which are tried first, but the memory left for all nodes.
        if has_room_changed and len(settled) == len(land.groups):
            settled, has_room_changed = set(), False
    return tuple(current)


def shed(land: Landscape, start: Sequence[int], *, most_moves: int) -> tuple[int, ...]:
    """A choice within the limit from `start`, which is above it, by the moves that cost least for each byte saved.

    It is still above the limit if no move saves memory or `most_moves` do not suffice.
    """
    current, limit = list(start), land.table.memory_limit_bytes
    for _ in range(most_moves):
        excess = _memory_used(land, current) - limit
        if excess <= 0:
            break
        rate, group, moved = min(
            (_cheapest_shed(land, current, group, excess) for group in land.groups), default=(np.inf, (), ())
        )
        if rate == np.inf:
            break
        for v, k in zip(group, moved):
            current[v] = k
    return tuple(current)


def _cheapest_shed(
    land: Landscape, current: Sequence[int], group: tuple[int, ...], excess: float
) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """(seconds for each byte by which the group can reduce the excess,
    `inf` if it cannot; group; its strategies then).
    """
    now = tuple(current[v] for v in group)
    cost, memory = (_given_others(land, current, group, term) for term in ("cost", "memory"))
    saved = np.minimum(memory[now] - memory, excess)
    rate = np.divide(cost - cost[now], saved, out=np.full(cost.shape, np.inf), where=saved > 0)
    best = _argmin(rate)
    return float(rate[best]), group, best


def own_starts(land: Landscape) -> tuple[tuple[int, ...], ...]:
    """Cheap starts: each node's best strategy alone, by cost and, if it is limited, by memory.

    Half of the least terms of its edges count.
    """
    terms = ["cost", "memory"] if np.isfinite(land.table.memory_limit_bytes) else ["cost"]
    return tuple(tuple(_own_best(land, v, term) for v in range(len(land.cost))) for term in terms)


def _own_best(land: Landscape, v: int, term: str) -> int:
    return int((getattr(land, term)[v] + 0.5 * sum(getattr(i, term).min(axis=1) for i in land.incident[v])).argmin())


def _best_move(land: Landscape, current: Sequence[int], group: tuple[int, ...], used: float) -> tuple[int, ...] | None:
    """The group's best strategies given those of all other nodes; None if they are no better than the current ones."""
    now, limit = tuple(current[v] for v in group), land.table.memory_limit_bytes
    cost = _given_others(land, current, group, "cost")
    most = cost[now] - _LEAST_GAIN * abs(cost[now])
    if used <= limit and not cost.min() < most:
        return None
    if np.isfinite(limit):
        memory = _given_others(land, current, group, "memory")
        excess = np.maximum(memory + (used - memory[now] - limit), 0.0)
        least = excess.min()
        cost = np.where(excess <= least, cost, np.inf)
        if excess[now] > least * (1 + _LEAST_GAIN):
            return _argmin(cost)
    best = _argmin(cost)
    return best if cost[best] < most else None


def _given_others(land: Landscape, current: Sequence[int], group: tuple[int, ...], term: str) -> np.ndarray:
    """Cost or memory of each combination of the group's strategies, with all other nodes unchanged."""
    if len(group) == 1:
        return _field(land, current, group[0], term, beside=-1)
    a, b = group
    joint = next(i for i in land.incident[a] if i.other == b)
    return (
        _field(land, current, a, term, beside=b)[:, None]
        + _field(land, current, b, term, beside=a)
        + getattr(joint, term)
    )


def _field(land: Landscape, current: Sequence[int], v: int, term: str, *, beside: int) -> np.ndarray:
    values = getattr(land, term)[v]
    for incidence in land.incident[v]:
        if incidence.other != beside:
            values = values + getattr(incidence, term)[:, current[incidence.other]]
    return values


def _memory_used(land: Landscape, current: Sequence[int]) -> float:
    """Bytes of the choice; 0 without a memory limit."""
    if np.isinf(land.table.memory_limit_bytes):
        return 0.0
    nodes = sum(float(memory[k]) for memory, k in zip(land.memory, current))
    both = sum(float(i.memory[k, current[i.other]]) for incident, k in zip(land.incident, current) for i in incident)
    return nodes + both / 2


def _dependent(land: Landscape, touched: set[int]) -> set[tuple[int, ...]]:
    """The groups with a node in `touched` or a neighbour of one."""
    beside = touched | {incidence.other for v in touched for incidence in land.incident[v]}
    return {group for v in beside for group in land.member_of[v]}


def _argmin(cost: np.ndarray) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(cost.argmin(), cost.shape))


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _walled(values: np.ndarray, cost: np.ndarray, wall: float) -> np.ndarray:
    forbidden = np.isinf(cost)
    return np.where(forbidden, wall, values) if forbidden.any() else values
