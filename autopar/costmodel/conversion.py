"""What it costs to turn one layout of a value into another, for many pairs of layouts at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, product

import numpy as np

from autopar.costmodel.collective import collective_times
from autopar.costmodel.hardware import Cluster
from autopar.costmodel.memory import local_bytes, memory_layout
from autopar.ir.graph import Value
from autopar.sbp.assignment import latency_share
from autopar.sbp.placement import I, Layout, P, R, S
from autopar.sbp.redistribute import CONVERSIONS, Step, redistribute

Layouts = tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """Collectives that take the same time on values of the same size: the buffer is the value's bytes over `divisor`."""

    kind: str
    axis: int
    divisor: int
    phase: str


@dataclass(frozen=True, eq=False)
class Recipe:
    """Source layout i turns into target layout j by the collectives `kinds[k] for k in rows[pattern[i, j]]`; -1 pads a row."""

    kinds: tuple[Kind, ...]
    rows: np.ndarray  # i64[patterns, most collectives of a pattern]
    pattern: np.ndarray  # i64[sources, targets]


@cache
def all_kinds(mesh_shape: tuple[int, ...]) -> tuple[Kind, ...]:
    """Everything that can occur on a mesh."""
    divisors = sorted({math.prod(sizes) for count in range(len(mesh_shape) + 1) for sizes in combinations(mesh_shape, count)})
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    return tuple(Kind(*found) for found in product(names, range(len(mesh_shape)), divisors, ("forward", "backward")))


@cache
def _numbers(mesh_shape: tuple[int, ...]) -> Mapping[Kind, int]:
    return {kind: number for number, kind in enumerate(all_kinds(mesh_shape))}


@cache
def _pattern_row(codes: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Positions in `all_kinds` of the collectives between two layouts, given as their codes one after the other."""
    layout = tuple(S(code) if code >= 0 else _WHOLE[code] for code in codes)
    steps = redistribute(layout[: len(mesh_shape)], layout[len(mesh_shape) :])
    return tuple(_numbers(mesh_shape)[kind] for step in steps for kind in _step_kinds(step, mesh_shape))


@cache
def _step_kinds(step: Step, mesh_shape: tuple[int, ...]) -> tuple[Kind, ...]:
    """As `collectives_of`, for any shape that the layouts split evenly."""
    if mesh_shape[step.axis] == 1:
        return ()
    divisor = min(_num_shards(step.layout, mesh_shape), _num_shards(step.after, mesh_shape))
    phases = zip(CONVERSIONS[step.src.kind, step.dst.kind], ("forward", "backward"))
    return tuple(Kind(kind, step.axis, divisor, phase) for kind, phase in phases if kind)


def _num_shards(layout: Layout, mesh_shape: tuple[int, ...]) -> int:
    return math.prod(size for placement, size in zip(layout, mesh_shape) if placement.is_split)


@lru_cache(maxsize=256)
def recipe(sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...]) -> Recipe:
    """The collectives of every pair, whatever the value.

    The steps depend on which splits are of the same dim, not on its number: pairs that are equal up to renaming dims share a pattern.
    """
    ndim = len(mesh_shape)
    pairs = np.concatenate(np.broadcast_arrays(_codes(sources, ndim)[:, None], _codes(targets, ndim)[None]), axis=-1).reshape(-1, 2 * ndim)
    first_equal = (pairs[:, :, None] == pairs[:, None, :]).argmax(axis=-1)
    renamed = np.where(pairs >= 0, first_equal, pairs)
    packed = (renamed + len(_CODES)) @ (2 * ndim + len(_CODES)) ** np.arange(2 * ndim)
    _, examples, pattern = np.unique(packed, return_index=True, return_inverse=True)
    found = [_pattern_row(tuple(row), mesh_shape) for row in renamed[examples].tolist()]
    width = max(map(len, found), default=0)
    rows = np.array([row + (-1,) * (width - len(row)) for row in found], dtype=np.int64).reshape(len(found), width)
    return Recipe(all_kinds(mesh_shape), rows, pattern.reshape(len(sources), len(targets)))


_CODES = {"P": -1, "I": -2, "R": -3}
_WHOLE = {-1: P, -2: I, -3: R}


def _codes(layouts: Layouts, ndim: int) -> np.ndarray:
    """i64[layouts, axes]: the dim of a split, a negative number for the others."""
    return np.array([[_CODES.get(p.kind, p.dim) for p in layout] for layout in layouts], dtype=np.int64).reshape(-1, ndim)


def conversion_times(
    value: Value, sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...], cluster: Cluster, *, latency_share: float = 1.0
) -> np.ndarray:
    """f64[sources, targets]: seconds, forward and (if the value needs a gradient) backward."""
    found = recipe(sources, targets, mesh_shape)
    times = np.zeros(len(found.kinds) + 1)  # the last stays 0, for the padding
    for position in np.unique(found.rows[found.rows >= 0]):
        kind = found.kinds[position]
        if kind.phase == "forward" or value.needs_grad:
            num_bytes = np.float64(value.num_bytes // kind.divisor)
            times[position] = collective_times(cluster, mesh_shape, kind.axis, kind.kind, num_bytes, latency_share=latency_share)
    return times[found.rows].sum(axis=-1)[found.pattern]


def parameter_times(value: Value, sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...], cluster: Cluster) -> np.ndarray:
    """`conversion_times` of a parameter: where it is stored, its gradient may be reduced with others (`assignment.buckets`)."""
    alone = conversion_times(value, sources, targets, mesh_shape, cluster)
    together = conversion_times(value, sources, targets, mesh_shape, cluster, latency_share=latency_share(value))
    return np.where(_only_reduces_gradient(sources, targets), together, alone)


@lru_cache(maxsize=256)
def _only_reduces_gradient(sources: Layouts, targets: Layouts) -> np.ndarray:
    """bool[sources, targets]: whether every axis stays or goes from I to R."""
    ndim = max(map(len, sources + targets), default=0)
    src, dst = _codes(sources, ndim)[:, None], _codes(targets, ndim)[None]
    return ((src == dst) | ((src == _CODES["I"]) & (dst == _CODES["R"]))).all(axis=-1)


def copy_bytes(value: Value, sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...], *, is_held: bool) -> np.ndarray:
    """f64[sources, targets]: what backward keeps of a value that is saved once it is converted: one rank's part.

    is_held: what is converted is in memory until backward anyhow, so where the conversion leaves the tensor as it is nothing is added.
    """
    kept = [local_bytes(value.shape, value.dtype.itemsize, layout, mesh_shape) for layout in targets]
    copies = np.broadcast_to(np.array(kept, dtype=np.float64), (len(sources), len(targets)))
    return np.where(same_tensor(sources, targets), 0.0, copies) if is_held else np.array(copies)


@lru_cache(maxsize=256)
def same_tensor(sources: Layouts, targets: Layouts) -> np.ndarray:
    """bool[sources, targets]: whether the local tensor stays as it is; whole is whole, be its gradient summed or pending."""
    ndim = max(map(len, sources + targets), default=0)
    mine, theirs = (_codes(tuple(map(memory_layout, layouts)), ndim) for layouts in (sources, targets))
    return (mine[:, None] == theirs[None]).all(axis=-1)
