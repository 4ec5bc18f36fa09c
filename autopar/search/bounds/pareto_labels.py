"""Elimination with two objectives, cost and memory, which closes the duality gap of a price on memory.

Elimination keeps the least cost for each assignment of a bucket's neighbours; this keeps a Pareto front of labels
(cost, memory) instead, partial choices of which none is both cheaper and lighter than another. A label that cannot be
part of a choice below the threshold, by the bounds of the elimination at one price of memory, is dropped, which keeps
fronts short. If they still grow too long, costs are rounded down to steps and only the lightest label of each step is
kept. The result is a lower bound, and a choice whose memory is exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.bounds.lagrange import ROUNDING
from autopar.search.deadline import NEVER, Deadline
from autopar.search.min_plus.eliminate import Bucket, Elimination
from autopar.search.min_plus.factors import Factor, contract
from autopar.search.min_plus.min_marginals import outside_messages
from autopar.search.table import CostTable

# The most labels of one message, about 100 bytes each.
_MOST_LABELS = 300_000
# This number of labels for each assignment is always allowed.
_FEW = 4
# The number of pairs of labels processed at a time.
_AT_ONCE = 2_000_000


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of a message: partial choices of the nodes below it.

    `start[i] : start[i + 1]` are the labels for assignment i of the scope (flattened). `taken`: strategy of the
    bucket's node; `origins[j]`: the label of the j-th message into the bucket.
    """

    message: Factor
    start: np.ndarray  # i64[assignments + 1]
    cost_s: np.ndarray  # f64[labels]
    memory_bytes: np.ndarray  # f64[labels]
    taken: np.ndarray  # i64[labels]
    origins: tuple[np.ndarray, ...]  # i64[labels] each


@dataclass(frozen=True)
class Front:
    """The result: no choice below the threshold and within the limit costs less than `bound_s`.

    `choice`: the choice that reaches it, if any; its cost exceeds the bound by the rounding, its memory is within the
    limit.
    """

    bound_s: float
    choice: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class _Search:
    """The data of one search: a label is kept if cost + price * memory + the least of the rest is below the ceiling."""

    table: CostTable
    price: float
    ceiling: float
    outside: Mapping[Factor, Factor]
    edges: Mapping[tuple[int, int], int]
    most_labels: int
    deadline: Deadline


class _OutOfTime(Exception):
    """Raised when the deadline has passed."""


def eliminate_labels(
    table: CostTable,
    elimination: Elimination,
    price: float,
    threshold_s: float,
    *,
    most_labels: int = _MOST_LABELS,
    deadline: Deadline = NEVER,
) -> Front | None:
    """The cheapest choice within the memory limit that costs less than `threshold_s`; None after the deadline.

    `elimination`: of the table at `price` (seconds a byte). `most_labels`: of one message.
    """
    edges = {(edge.a, edge.b): i for i, edge in enumerate(table.edges)}
    ceiling = threshold_s + (price * table.memory_limit_bytes * (1 + ROUNDING) if price else 0.0)
    search = _Search(table, price, ceiling, outside_messages(elimination), edges, most_labels, deadline)
    made: dict[Factor, tuple[Bucket, Labels]] = {}
    try:
        for bucket in elimination.buckets:
            labels = _labels_of(search, bucket, [made[factor][1] for factor in bucket.factors if factor in made])
            if not labels.cost_s.size:
                return Front(threshold_s, None)
            made[bucket.message] = bucket, labels
        return _best(search, threshold_s, made)
    except _OutOfTime:
        return None


def _best(search: _Search, threshold_s: float, made: Mapping[Factor, tuple[Bucket, Labels]]) -> Front:
    """The cheapest label within the limit of the joined components, which have no node in common."""
    roots = [labels for _, labels in made.values() if not labels.message.scope]
    joined = _Joined(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), np.zeros(1, np.int64), ())
    for i, root in enumerate(roots):
        rest = np.array([sum(float(other.message.values) for other in roots[i + 1 :])])
        joined = _extended(search, joined, root, np.zeros(1, np.int64), rest)
    within = np.flatnonzero(joined.memory_bytes <= search.table.memory_limit_bytes)
    if not within.size or joined.cost_s[within].min() >= threshold_s:
        return Front(threshold_s, None)
    best = within[joined.cost_s[within].argmin()]
    chosen: dict[int, int] = {}
    for root, origin in zip(roots, joined.origins):
        _trace(made, root.message, int(origin[best]), chosen)
    return Front(float(joined.cost_s[best]), tuple(chosen[v] for v in range(len(chosen))))


def _trace(made: Mapping[Factor, tuple[Bucket, Labels]], root: Factor, label: int, chosen: dict[int, int]) -> None:
    waiting = [(root, label)]
    while waiting:
        message, label = waiting.pop()
        bucket, labels = made[message]
        chosen[bucket.node] = int(labels.taken[label])
        sources = [factor for factor in bucket.factors if factor in made]
        waiting += [(source, int(origin[label])) for source, origin in zip(sources, labels.origins)]


@dataclass(frozen=True, eq=False)
class _Joined:
    """Labels of a bucket under construction: `at` is a label's assignment as a number, `taken` the node's strategy."""

    at: np.ndarray
    cost_s: np.ndarray
    memory_bytes: np.ndarray
    taken: np.ndarray
    origins: tuple[np.ndarray, ...]

    def __getitem__(self, which: np.ndarray) -> "_Joined":
        origins = tuple(origin[which] for origin in self.origins)
        return _Joined(self.at[which], self.cost_s[which], self.memory_bytes[which], self.taken[which], origins)


def _labels_of(search: _Search, bucket: Bucket, incoming: Sequence[Labels]) -> Labels:
    """The labels of a bucket's message: its terms and incoming labels joined, its node minimised out."""
    scope = tuple(sorted((*bucket.message.scope, bucket.node)))
    outside = search.outside[bucket.message]
    spots = np.nonzero(contract((*bucket.factors, outside), scope).values < search.ceiling)
    strategies = dict(zip(scope, spots))
    joined = _own_terms(search, bucket, strategies)
    rest = [*(_gathered(labels.message, strategies) for labels in incoming), _gathered(outside, strategies)]
    for i, labels in enumerate(incoming):
        others = np.asarray(sum(rest[i + 1 :]))  # at least what is outside
        joined = _extended(search, joined, labels, _flat(labels.message, strategies), others)
    assignment = _flat(bucket.message, strategies)
    kept = _front(replace(joined, at=assignment[joined.at]), search.most_labels)
    start = np.searchsorted(kept.at, np.arange(bucket.message.values.size + 1))
    return Labels(bucket.message, start, kept.cost_s, kept.memory_bytes, kept.taken, kept.origins)


def _own_terms(search: _Search, bucket: Bucket, strategies: Mapping[int, np.ndarray]) -> _Joined:
    """One label for each possible assignment, with the terms of the bucket's node and of the edges it eliminates."""
    own, taken = search.table.nodes[bucket.node], strategies[bucket.node]
    cost, memory = own.cost_s[taken], own.memory_bytes[taken]
    for factor in bucket.factors:
        if len(factor.scope) == 2 and factor not in search.outside:
            edge = search.table.edges[search.edges[factor.scope]]
            pair = strategies[edge.a], strategies[edge.b]
            cost, memory = cost + edge.cost_s[pair], memory + edge.memory_bytes[pair]
    return _Joined(np.arange(taken.size), cost, memory, taken, ())


def _gathered(factor: Factor, strategies: Mapping[int, np.ndarray]) -> np.ndarray:
    """The values of the factor at each possible assignment."""
    return factor.values.reshape(-1)[_flat(factor, strategies)]


def _flat(factor: Factor, strategies: Mapping[int, np.ndarray]) -> np.ndarray:
    """The assignment of the factor's scope, as a number, at each possible assignment."""
    if not factor.scope:
        return np.zeros(next(iter(strategies.values())).size, np.int64)
    return np.ravel_multi_index(tuple(strategies[v] for v in factor.scope), factor.values.shape)


def _extended(search: _Search, joined: _Joined, labels: Labels, spot: np.ndarray, rest: np.ndarray) -> _Joined:
    """Each label joined with each label of the message at the same assignment, if below the ceiling with the rest."""
    counts = (labels.start[spot + 1] - labels.start[spot])[joined.at]
    cuts = np.searchsorted(np.cumsum(counts), np.arange(0, counts.sum(), _AT_ONCE)[1:])
    parts = []
    for mine in np.split(np.arange(counts.size), cuts):
        if search.deadline.is_past:
            raise _OutOfTime
        number = counts[mine]
        theirs = np.arange(number.sum()) + np.repeat(
            labels.start[spot[joined.at[mine]]] - (np.cumsum(number) - number), number
        )
        part = joined[np.repeat(mine, number)]
        cost, memory = part.cost_s + labels.cost_s[theirs], part.memory_bytes + labels.memory_bytes[theirs]
        part = _Joined(part.at, cost, memory, part.taken, (*part.origins, theirs))
        parts.append(part[np.flatnonzero(cost + search.price * memory + rest[part.at] < search.ceiling)])
    return _front(_concatenated(parts), search.most_labels)


def _concatenated(parts: Sequence[_Joined]) -> _Joined:
    columns = [
        np.concatenate(column)
        for column in zip(*((p.at, p.cost_s, p.memory_bytes, p.taken, *p.origins) for p in parts))
    ]
    at, cost_s, memory_bytes, taken, *origins = columns
    return _Joined(at, cost_s, memory_bytes, taken, tuple(origins))


def _front(joined: _Joined, most_labels: int) -> _Joined:
    """The undominated labels of each assignment, by assignment, then memory; with costs rounded down if too many."""
    exact = kept = joined[_undominated(joined)]
    enough = max(most_labels, _FEW * np.unique(exact.at).size)
    step = 1e-7 * float(np.abs(exact.cost_s).max(initial=0.0))
    while kept.at.size > enough:
        kept = replace(exact, cost_s=np.minimum(np.floor(exact.cost_s / step) * step, exact.cost_s))
        kept = kept[_undominated(kept)]
        step *= 2.0
    return kept


def _undominated(joined: _Joined) -> np.ndarray:
    """Indices of the labels that no other label of their assignment dominates, by assignment, then memory."""
    order = np.lexsort((joined.cost_s, joined.memory_bytes, joined.at))
    at = joined.at[order]
    _, rank = np.unique(joined.cost_s[order], return_inverse=True)
    # Costs of later assignments are shifted below all earlier ones, so that one running minimum serves all.
    value = rank + (at[-1] - at if at.size else at) * (rank.size + 1)
    before = np.minimum.accumulate(value)[:-1]
    is_first = np.ones(at.size, bool)
    is_first[1:] = value[1:] < before
    return order[is_first]
