"""Functions shared by the local ops and their lists of collectives."""

import math
from collections.abc import Sequence

import torch

from autopar.ir.graph import Op
from autopar.sbp.axis import Axis
from autopar.sbp.placement import S, local_shape
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy


def role_axes(strategy: Strategy, role: str, mesh_shape: tuple[int, ...]) -> list[int]:
    """Mesh axes larger than 1 that take `role`, outermost first."""
    return [
        axis for axis, signature in enumerate(strategy.signatures) if signature.role == role and mesh_shape[axis] > 1
    ]


def local_input_shape(op: Op, strategy: Strategy, index: int, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one rank's part of `op.inputs[index]`."""
    return local_shape(op.inputs[index].shape, strategy.input_layout(index), mesh_shape)


def has_backward(op: Op) -> bool:
    """Whether a gradient flows to the first input, on which alone the sums over ranks depend."""
    return op.inputs[0].needs_grad and any(output.needs_grad for output in op.outputs)


def no_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The empty list of collectives, for a local op that needs none."""
    return ()


def num_ranks(axes: Sequence[Axis]) -> int:
    """The number of ranks on all of `axes` together."""
    return math.prod(axis.size for axis in axes)


def rank_index(axes: Sequence[Axis]) -> int:
    """The index of this rank's part of a dim that `axes` split, outermost axis first; parts lie in mesh order."""
    index = 0
    for axis in axes:
        index = index * axis.size + axis.index
    return index


Part = tuple[int, int, bool]  # the size of a dim whose parts differ, their unit, and whether they are in shares


def share_of(axes: Sequence[Axis], part: Part) -> float:
    """This rank's share of a dim that `axes` split."""
    sizes = sizes_of(axes, part)
    return sizes[rank_index(axes)] / part[0]


def sizes_of(axes: Sequence[Axis], part: Part) -> tuple[int, ...]:
    """The sizes of all parts of a dim that `axes` split, in row-major order."""
    extent, unit, is_shared = part
    sizes: tuple[int, ...] = (extent,)
    for axis in axes:
        split = S(0, unit, axis.shares if is_shared else ())
        sizes = tuple(part for size in sizes for part in axis.parts(size, split))
    return sizes


def first_of(axes: Sequence[Axis], part: Part | None, size: int) -> int:
    """The position of the first element of this rank's part, which has `size`, of a dim that `axes` split."""
    if part is None:
        return rank_index(axes) * size
    return sum(sizes_of(axes, part)[: rank_index(axes)])


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed over ranks: float64 for float64, float32 for all others."""
    return dtype if dtype == torch.float64 else torch.float32
