"""What it costs to turn one layout of a value into another, for many pairs of layouts at once."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.costmodel.hardware import Cluster
from autopar.costmodel.collective import collective_times
from autopar.costmodel.memory import is_same_tensor, local_bytes
from autopar.ir.graph import Value
from autopar.sbp.placement import Layout
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
    """`index[i, j]` are positions in `kinds`: the collectives that turn source layout i into target layout j; -1 pads."""

    kinds: tuple[Kind, ...]
    index: np.ndarray  # i32[sources, targets, most collectives of a pair]


@lru_cache(maxsize=None)
def _pair(src: Layout, dst: Layout, mesh_shape: tuple[int, ...]) -> tuple[Kind, ...]:
    return tuple(kind for step in redistribute(src, dst) for kind in _step_kinds(step, mesh_shape))


@lru_cache(maxsize=None)
def _step_kinds(step: Step, mesh_shape: tuple[int, ...]) -> tuple[Kind, ...]:
    """As `collectives_of`, for any shape that the layouts split evenly."""
    if mesh_shape[step.axis] == 1:
        return ()
    divisor = min(_num_shards(step.layout, mesh_shape), _num_shards(step.after, mesh_shape))
    phases = zip(CONVERSIONS[step.src.kind, step.dst.kind], ("forward", "backward"))
    return tuple(Kind(kind, step.axis, divisor, phase) for kind, phase in phases if kind)


def _num_shards(layout: Layout, mesh_shape: tuple[int, ...]) -> int:
    return math.prod(size for placement, size in zip(layout, mesh_shape) if placement.is_split)


@lru_cache(maxsize=None)
def recipe(sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...]) -> Recipe:
    """The collectives of every pair, whatever the value."""
    numbers: dict[Kind, int] = {}
    rows = [[numbers.setdefault(kind, len(numbers)) for kind in _pair(src, dst, mesh_shape)] for src in sources for dst in targets]
    index = np.full((len(rows), max(map(len, rows), default=0)), -1, dtype=np.int32)
    for row, found in enumerate(rows):
        index[row, : len(found)] = found
    return Recipe(tuple(numbers), index.reshape(len(sources), len(targets), -1))


def conversion_times(value: Value, sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...], cluster: Cluster) -> np.ndarray:
    """f64[sources, targets]: seconds, forward and (if the value needs a gradient) backward."""
    found = recipe(sources, targets, mesh_shape)
    times = np.zeros(len(found.kinds) + 1)  # the last stays 0, for the padding
    for position, kind in enumerate(found.kinds):
        if kind.phase == "forward" or value.needs_grad:
            num_bytes = np.float64(value.num_bytes // kind.divisor)
            times[position] = collective_times(cluster, mesh_shape, kind.axis, kind.kind, num_bytes)
    return times[found.index].sum(axis=-1)


def layout_bytes(value: Value, layouts: Layouts, mesh_shape: tuple[int, ...]) -> np.ndarray:
    """f64[layouts]: bytes of one rank's part."""
    return np.array([local_bytes(value.shape, value.dtype.itemsize, layout, mesh_shape) for layout in layouts], dtype=np.float64)


@lru_cache(maxsize=None)
def same_tensor(sources: Layouts, targets: Layouts) -> np.ndarray:
    """bool[sources, targets]: whether the conversion leaves the local tensor as it is."""
    return np.array([[is_same_tensor(src, dst) for dst in targets] for src in sources], dtype=bool).reshape(len(sources), len(targets))
