"""Calls in which each rank gives its own part of the batch, as under DistributedDataParallel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, MicrobatchError
from autopar.ir.graph import Graph, Value
from autopar.sbp.convert import Axis, convert
from autopar.sbp.microbatch.split_batch import batch_size, split_batch
from autopar.sbp.placement import I, Layout, S
from autopar.sbp.uneven.extents import extents_of_parts

# Axes along which ranks share their rows, as every trainer has it: one data loader for all ranks of a model's copy.
SHARING = frozenset(("pp", "tp", "cp", "sp", "mp", "model"))


@dataclass(frozen=True)
class LocalBatch:
    """The ranks that differ on `axis_names` hold `num_parts` parts of the batch, in row-major order; others share one.

    Every plain tensor argument that has a dim 0 is a part of it along dim 0.
    """

    axis_names: tuple[str, ...]
    num_parts: int

    def whole_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Shape of the argument of which this rank gives `x`."""
        is_part = x.ndim > 0 and not isinstance(x, DTensor)
        return (x.shape[0] * self.num_parts, *x.shape[1:]) if is_part else tuple(x.shape)

    def layout(self, axis_names: Sequence[str], dim: int = 0) -> Layout:
        """How parts along `dim` lie on the mesh axes of these names."""
        return tuple(S(dim) if name in self.axis_names else I for name in axis_names)

    def enter(self, x: torch.Tensor, axes: Sequence[Axis], layout: Layout) -> torch.Tensor:
        """This rank's part of an argument that lies in `layout`; `x` is what it was given."""
        own = self.layout([axis.name for axis in axes]) if x.ndim else (I,) * len(axes)
        return redistributed(x, self.whole_shape(x), axes, own, layout)

    def whole(self, x: Any, move: Callable[[torch.Tensor], torch.Tensor], axes: Sequence[Axis]) -> Any:
        """All ranks' parts of an argument, if it has parts. `move`: to the mesh's device."""
        is_part = isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
        return self.enter(move(x), axes, (I,) * len(axes)) if is_part else x

    def leave(
        self, x: torch.Tensor, shape: Sequence[int], axes: Sequence[Axis], layout: Layout, dim: int
    ) -> torch.Tensor:
        """This rank's rows of an output of global `shape` that lies in `layout`, the batch along `dim`.

        Backward of rows takes the mean over the parts, as DistributedDataParallel does: a loss that each rank computes
        of its rows stands for the mean of all ranks' losses.
        """
        rows = redistributed(x, shape, axes, layout, self.layout([axis.name for axis in axes], dim))
        if rows.requires_grad and self.num_parts > 1:
            rows.register_hook(lambda gradient: gradient / self.num_parts)
        return rows


def redistributed(
    x: torch.Tensor, shape: Sequence[int], axes: Sequence[Axis], src: Layout, dst: Layout
) -> torch.Tensor:
    """The local part `x` of a value of global `shape` in layout `dst` instead of `src`, of S and I; its gradient goes
    back the same way.

    Splits of one dim are nested in mesh order: what lies inside the first axis that differs is gathered, then cut.
    """
    first = next((i for i, (a, b) in enumerate(zip(src, dst)) if a != b), len(src))
    steps = list(zip(axes, src, dst, extents_of_parts(shape, axes, src)))[first:]
    for axis, placement, _, extent in reversed(steps):
        x = convert(x, axis, placement, I, extent=extent) if placement.is_split else x
    for axis, _, placement, _ in steps:
        x = convert(x, axis, I, placement) if placement.is_split else x
    return x


def rows_of(graph: Graph) -> dict[int, int]:
    """Which of the graph's outputs are rows of the batch: index -> the dim along which.

    Where the batch cannot be followed through the graph (a batch norm mixes its rows), outputs with its size as dim 0.
    """
    outputs = [(i, value) for i, value in enumerate(graph.outputs) if isinstance(value, Value)]
    try:
        placements = split_batch(graph).placements
    except MicrobatchError:
        return {i: 0 for i, value in outputs if value.shape and value.shape[0] == batch_size(graph)}
    return {i: placements[value.name].dim for i, value in outputs if placements[value.name].is_split}


def output_layouts(
    graph: Graph, axis_names: Sequence[str], parts: LocalBatch | None, *, is_whole: bool
) -> dict[str, Layout]:
    """Output with dims -> the layout in which a call gives it: rows of the batch, if ranks hold `parts`, else whole.

    Without `is_whole` only those of rows.
    """
    rows = {} if parts is None else rows_of(graph)
    layouts = {}
    for i, value in enumerate(graph.outputs):
        if isinstance(value, Value) and value.shape:
            if parts is not None and i in rows:
                layouts[value.name] = parts.layout(axis_names, rows[i])
            elif is_whole:
                layouts[value.name] = (I,) * len(axis_names)
    return layouts


def local_batch(mesh: DeviceMesh, batch: str | Sequence[str]) -> LocalBatch | None:
    """The meaning of `batch`, an argument of `autopar.compile`: None if every rank gives the whole batch.

    AutoparError if it is neither "global", "local" nor axes of the mesh.
    """
    names = mesh.mesh_dim_names or ()
    if batch == "global":
        return None
    if batch == "local":
        batch = tuple(name for name in names if name not in SHARING)
    if isinstance(batch, str) or not all(name in names for name in batch):
        raise AutoparError(
            f"batch= expects 'global' (every rank gives the whole batch), 'local' (each gives its part) or the axes of"
            f" the mesh on which ranks have other rows, of {', '.join(names)}; found {batch!r}"
        )
    sizes = dict(zip(names, mesh.mesh.shape))
    parts: Any = 1
    for name in batch:
        parts *= sizes[name]
    return LocalBatch(tuple(name for name in batch if sizes[name] > 1), int(parts)) if parts > 1 else None
