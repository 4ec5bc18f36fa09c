"""The cost of converting a value from one layout to another, for many pairs of layouts at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.costmodel.activations.saved_activations import NOWHERE, Saving
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.collective_time import seconds_of
from autopar.costmodel.memory import local_bytes, memory_layout
from autopar.costmodel.training import Training
from autopar.costmodel.uneven_conversions import forbidden, uneven_recipe
from autopar.ir.graph import Value
from autopar.sbp.assignment import InBucket, latency_share, only_gathers
from autopar.sbp.placement import OWN, USED, WHOLE, Codes, Layout, codes_of
from autopar.sbp.redistribute import CollectiveKind, collective_kinds, moves

Layouts = tuple[Layout, ...]
Weigh = Callable[[CollectiveKind], float]


@dataclass(frozen=True, eq=False)
class Recipe:
    """The collectives of conversions: from source i to target j they are `kinds[k] for k in rows[pattern[i, j]]`.

    -1 pads a row. `used`: the k that occur.
    """

    kinds: tuple[CollectiveKind, ...]
    rows: np.ndarray  # i64[patterns, most collectives of a pattern]
    pattern: np.ndarray  # i64[sources, targets]
    used: tuple[int, ...]


class _Patterns:
    """The known patterns of one mesh, by number; very many pairs of layouts share a pattern."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.mesh_shape = mesh_shape
        self.numbers: dict[int, int] = {}  # packed codes -> number
        self.kinds: dict[CollectiveKind, int] = {}
        self.rows = np.full((0, 0), -1, dtype=np.int64)

    def number(self, packed: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """i64[patterns]: the numbers of patterns given as packed and as plain codes."""
        keys = packed.tolist()
        new = [position for position, key in enumerate(keys) if key not in self.numbers]
        if new:
            self._add([keys[position] for position in new], codes[new].tolist())
        return np.array([self.numbers[key] for key in keys], dtype=np.int64)

    def _add(self, keys: list[int], codes: list[list[int]]) -> None:
        numbers_of_rows = [self._numbers_of_kinds(tuple(row)) for row in codes]
        width = max(self.rows.shape[1], *map(len, numbers_of_rows))
        rows = [row + [-1] * (width - len(row)) for row in numbers_of_rows]
        known = np.pad(self.rows, ((0, 0), (0, width - self.rows.shape[1])), constant_values=-1)
        self.rows = np.concatenate([known, np.array(rows, dtype=np.int64).reshape(len(rows), width)])
        self.numbers.update(zip(keys, range(len(self.numbers), len(self.numbers) + len(keys))))

    def _numbers_of_kinds(self, codes: Codes) -> list[int]:
        """The numbers of the collectives between two layouts, given as the codes of both, one after the other."""
        ndim = len(self.mesh_shape)
        steps = moves(codes[:ndim], codes[ndim:])
        kinds = [kind for step in steps for kind in collective_kinds(step, self.mesh_shape)]
        return [self.kinds.setdefault(kind, len(self.kinds)) for kind in kinds]


# A recipe holds all it needs of the patterns, so that a mesh dropped from the cache is only computed again.
_patterns = lru_cache(maxsize=64)(_Patterns)


@lru_cache(maxsize=256)
def recipe(sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...]) -> Recipe:
    """The collectives of every pair of layouts, for any value; none where there is no conversion (`forbidden`).

    The steps depend on which splits are of the same dim, not on its number: pairs that are equal up to renaming dims
    share a pattern.
    """
    ndim = len(mesh_shape)
    src, dst = np.broadcast_arrays(_codes(sources, ndim)[:, None], _codes(targets, ndim)[None])
    if (never := forbidden(sources, targets)) is not None:
        dst = np.where(never[..., None], src, dst)
    pairs = np.concatenate((src, dst), axis=-1).reshape(-1, 2 * ndim)
    first_equal = (pairs[:, :, None] == pairs[:, None, :]).argmax(axis=-1)
    renamed = np.where(pairs >= 0, first_equal, pairs)
    packed = (renamed - OWN) @ (2 * ndim - OWN) ** np.arange(2 * ndim)  # OWN is the lowest code
    distinct, examples, pattern = np.unique(packed, return_index=True, return_inverse=True)
    known = _patterns(mesh_shape)
    numbers = known.number(distinct, renamed[examples])
    used = np.unique(known.rows[numbers])
    return Recipe(
        tuple(known.kinds),
        known.rows,
        numbers[pattern].reshape(len(sources), len(targets)),
        tuple(used[used >= 0].tolist()),
    )


def _codes(layouts: Layouts, ndim: int) -> np.ndarray:
    """i64[layouts, axes]."""
    return np.array([codes_of(layout) for layout in layouts], dtype=np.int64).reshape(-1, ndim)


def conversion_times(
    value: Value,
    sources: Layouts,
    targets: Layouts,
    mesh_shape: tuple[int, ...],
    cluster: Cluster,
    *,
    latency_share: float = 1.0,
    is_copied: bool = False,
    weigh: Weigh | None = None,
) -> np.ndarray:
    """f64[sources, targets]: seconds, forward and (if the value needs a gradient) backward, each times its weight.

    `latency_share`, `is_copied`: as of `collective_times`; `weigh`: the weight of a collective, 1 by default.
    """
    shared = latency_share, is_copied
    ways = recipe(sources, targets, mesh_shape)
    times = np.zeros(len(ways.kinds) + 1)  # the last stays 0, for the padding
    for position in ways.used:
        kind = ways.kinds[position]
        if kind.phase == "forward" or value.needs_grad:
            num_elements = math.prod(value.shape)
            num_bytes = kind.num_bytes(num_elements, value.dtype.itemsize, value.sum_itemsize)
            times[position] = seconds_of(cluster, mesh_shape, kind.axes, kind.kind, num_bytes, *shared)
            times[position] *= 1.0 if weigh is None else weigh(kind)
    found = times[ways.rows].sum(axis=-1)[ways.pattern]
    uneven = uneven_recipe(value, sources, targets, mesh_shape)
    if uneven is not None:
        times = np.zeros(len(uneven.sent) + 1)
        for position, (kind, num_bytes) in enumerate(uneven.sent):
            if kind.phase == "forward" or value.needs_grad:
                times[position] = seconds_of(cluster, mesh_shape, kind.axes, kind.kind, num_bytes, *shared)
                times[position] *= 1.0 if weigh is None else weigh(kind)
        found[uneven.pairs] = times[uneven.rows].sum(axis=-1)
    return found


@dataclass(frozen=True, slots=True)
class ParameterWeights:
    """The weights of a parameter's collectives: when it is converted, when only its gradient is reduced or it is
    prefetched, and when it is converted again in backward, and that is prefetched.
    """

    made: Weigh | None = None
    put_off: Weigh | None = None
    again: Weigh | None = None
    again_prefetched: Weigh | None = None


@dataclass(frozen=True, slots=True)
class ParameterTimes:
    """The times of converting a parameter, f64[sources, targets] each.

    `cost_s`: seconds, forward and backward. `again_s`: of a repetition in backward, without its gradient. `in_bucket`:
    where it is gathered in its bucket, since that is faster, or has its gradient reduced there.
    """

    cost_s: np.ndarray
    again_s: np.ndarray
    in_bucket: np.ndarray


def parameter_times(
    value: Value,
    sources: Layouts,
    targets: Layouts,
    mesh_shape: tuple[int, ...],
    cluster: Cluster,
    *,
    bucket: InBucket | None,
    weights: ParameterWeights = ParameterWeights(),
) -> ParameterTimes:
    """The times of a stored parameter, whose gradient may be reduced in a bucket, and which may be gathered in one.

    `bucket`: the one that it may be in (`assignment.buckets`). `weights`: as of
    `conversion_times`; whether a parameter is gathered in its bucket does not depend on them.
    """
    ends, frozen = (sources, targets, mesh_shape, cluster), replace(value, needs_grad=False)
    only_reduces, share = only_reduces_gradient(sources, targets), latency_share(value)
    # without overlap the fewest collectives are best, whose buckets do not end with a block
    is_reduced_there = value.needs_grad and bucket is not None and cluster.overlap > 0
    if bucket is not None and is_reduced_there:
        share = bucket.share_of(value)
    alone = conversion_times(value, *ends, weigh=weights.made)
    reduced = conversion_times(value, *ends, latency_share=share, weigh=weights.put_off)
    cost_s = np.where(only_reduces, reduced, alone)
    again_s = conversion_times(frozen, *ends, weigh=weights.again)
    in_bucket = only_reduces & is_reduced_there
    if bucket is not None:
        shared = {"latency_share": bucket.share_of(value), "is_copied": True}
        is_faster = conversion_times(value, *ends, **shared) < conversion_times(value, *ends)
        is_gathered_there = gathers(sources, targets) & (is_faster | bucket.is_prefetched)
        made = weights.put_off if bucket.is_prefetched else weights.made
        again = weights.again_prefetched if bucket.is_prefetched else weights.again
        cost_s = np.where(is_gathered_there, conversion_times(value, *ends, **shared, weigh=made), cost_s)
        again_s = np.where(is_gathered_there, conversion_times(frozen, *ends, **shared, weigh=again), again_s)
        in_bucket = in_bucket | is_gathered_there
    return ParameterTimes(cost_s, again_s, in_bucket)


@lru_cache(maxsize=256)
def gathers(sources: Layouts, targets: Layouts) -> np.ndarray:
    """bool[sources, targets]: whether the conversion is one step of all-gathers."""
    return np.array([[only_gathers(src, dst) for dst in targets] for src in sources])


@lru_cache(maxsize=256)
def only_reduces_gradient(sources: Layouts, targets: Layouts) -> np.ndarray:
    """bool[sources, targets]: whether every axis stays or goes from I to R."""
    ndim = max(map(len, sources + targets), default=0)
    src, dst = _codes(sources, ndim)[:, None], _codes(targets, ndim)[None]
    return ((src == dst) | ((src == WHOLE) & (dst == USED))).all(axis=-1)


def copy_bytes(
    value: Value, sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...], *, is_held: bool
) -> np.ndarray:
    """f64[sources, targets]: bytes on one rank of a value that is saved for backward after its conversion.

    `is_held`: the source is in memory until backward for other reasons, so that a conversion that does not change the
    local tensor adds none.
    """
    copies = np.broadcast_to(_local_bytes(value, targets, mesh_shape), (len(sources), len(targets)))
    return np.where(same_tensor(sources, targets), 0.0, copies) if is_held else np.array(copies)


def same_tensor(sources: Layouts, targets: Layouts) -> np.ndarray:
    """bool[sources, targets]: whether the conversion leaves the local tensor unchanged; I and R are the same here."""
    if len(sources) == len(targets) == 1:  # of an assignment: these must not push a table's lists out of the cache
        return np.array([[memory_layout(sources[0]) == memory_layout(targets[0])]])
    return _same_tensors(sources, targets)


@lru_cache(maxsize=256)
def _same_tensors(sources: Layouts, targets: Layouts) -> np.ndarray:
    ndim = max(map(len, sources + targets), default=0)
    mine, theirs = (_codes(tuple(map(memory_layout, layouts)), ndim) for layouts in (sources, targets))
    return (mine[:, None] == theirs[None]).all(axis=-1)


@dataclass(frozen=True, slots=True)
class Transition:
    """The conversions of a value from each of the layouts `sources` to each of `targets`.

    `saving`: their memory. `is_stored`: whether `sources` are layouts of an input.
    """

    value: Value
    sources: Layouts
    targets: Layouts
    saving: Saving
    is_parameter: bool
    is_stored: bool


def kept_bytes(
    way: Transition, mesh_shape: tuple[int, ...], training: Training, *, again: np.ndarray | bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, f64[sources, targets] each: kept from forward to backward, more while recomputed, offloaded a microbatch.

    `again`: bool[sources, targets], whether a parameter is regathered.
    """
    value, saving = way.value, way.saving
    ends = value, way.sources, way.targets, mesh_shape
    kept = inside = moved = np.zeros((len(way.sources), len(way.targets)))
    if way.is_parameter:
        copies = copy_bytes(*ends, is_held=True)
        if saving.is_saved or training.num_microbatches > 1:
            kept = copies
        if training.num_microbatches > 1 and value.needs_grad:
            kept = kept + _accumulated_bytes(*ends, is_stored=way.is_stored)
        return np.where(again, 0.0, kept), np.where(again & (saving.region != NOWHERE), copies, 0.0), moved
    if saving.is_entering and not saving.is_held:
        kept = kept + _local_bytes(value, way.sources, mesh_shape)[:, None]
    if saving.is_saved:
        kept = kept + copy_bytes(*ends, is_held=saving.is_held or saving.is_entering)
    if saving.is_saved_inside:
        inside = copy_bytes(*ends, is_held=saving.is_held_inside)
    if saving.is_source_moved and not saving.is_source_on_host:
        moved = moved + _local_bytes(value, way.sources, mesh_shape)[:, None]
    if saving.is_moved:
        moved = moved + copy_bytes(*ends, is_held=saving.is_source_on_host or saving.is_source_moved)
    return training.num_in_flight * kept, inside, moved


def _accumulated_bytes(
    value: Value, sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...], *, is_stored: bool
) -> np.ndarray:
    """Bytes, f64[sources, targets], of gradient accumulation buffers of a converted parameter.

    They are beyond the gradients in the stored layout, which are computed from these buffers one after the other.
    """
    itemsize = value.dtype.itemsize if value.stored_dtype is None else value.sum_itemsize
    each = _local_bytes(value, targets, mesh_shape) * itemsize / value.dtype.itemsize
    num_bytes = np.broadcast_to(each, (len(sources), len(targets)))
    if is_stored:
        stored = _local_bytes(value, sources, mesh_shape) * value.stored_itemsize / value.dtype.itemsize
        return np.maximum(0.0, num_bytes - stored[:, None])
    return np.where(np.array([[src == dst for dst in targets] for src in sources]), 0.0, num_bytes)


def _local_bytes(value: Value, layouts: Layouts, mesh_shape: tuple[int, ...]) -> np.ndarray:
    """f64[layouts]: bytes of one rank's part."""
    return np.array(
        [local_bytes(value.shape, value.dtype.itemsize, layout, mesh_shape) for layout in layouts], dtype=np.float64
    )
