"""Calls in which each rank gives its own part of the batch, as under DistributedDataParallel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, MicrobatchError
from autopar.ir.graph import Graph, Value
from autopar.mesh import SHARING, Shares
from autopar.sbp.axis import Axis
from autopar.sbp.convert import convert
from autopar.sbp.microbatch.split_batch import batch_size, split_batch
from autopar.sbp.placement import I, Layout, S
from autopar.sbp.uneven.extents import extents_of_parts


@dataclass(frozen=True)
class LocalBatch:
    """The ranks that differ on `axis_names` hold `num_parts` parts of the batch, in row-major order; others share one.

    Every plain tensor argument that has a dim 0 is a part of it along dim 0. `shares`: (axis name, rows of each of its
    ranks, this rank's index on it), where they have unequal parts.
    """

    axis_names: tuple[str, ...]
    num_parts: int
    shares: tuple[str, tuple[int, ...], int] | None = None

    def whole_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Shape of the argument of which this rank gives `x`; AutoparError if it has not this rank's share of rows."""
        is_part = x.ndim > 0 and not isinstance(x, DTensor)
        return (self._whole_size(x.shape[0]), *x.shape[1:]) if is_part else tuple(x.shape)

    def _whole_size(self, rows: int) -> int:
        if self.shares is None:
            return rows * self.num_parts
        name, sizes, index = self.shares
        units, rest = divmod(rows * self.num_parts // len(sizes), sizes[index])
        if rest or not units:
            raise AutoparError(
                f"this rank, {index} on axis {name}, gives {rows} rows, its share is"
                f" {sizes[index] * len(sizes) // self.num_parts} of shares {sizes}: give it as many, or every rank the"
                ' whole batch (batch="global"), which may have any size; StatefulSampler(..., drop_last=True) gives'
                " full steps alone"
            )
        return units * sum(sizes)

    def fraction(self) -> float:
        """This rank's share of the batch."""
        if self.shares is None:
            return 1 / self.num_parts
        _, sizes, index = self.shares
        return sizes[index] / sum(sizes) * len(sizes) / self.num_parts

    def layout(self, axis_names: Sequence[str], dim: int = 0, extent: int | None = None) -> Layout:
        """How parts along `dim`, of size `extent`, lie on the mesh axes of these names."""
        shared, sizes, _ = self.shares or ("", (), 0)
        unit = max(1, extent // sum(sizes)) if sizes and extent else 1
        split = {name: S(dim, unit, sizes if name == shared else ()) for name in self.axis_names}
        return tuple(split.get(name, I) for name in axis_names)

    def enter(self, x: torch.Tensor, axes: Sequence[Axis], layout: Layout) -> torch.Tensor:
        """This rank's part of an argument that lies in `layout`; `x` is what it was given."""
        shape = self.whole_shape(x)
        own = self.layout([axis.name for axis in axes], extent=shape[0]) if x.ndim else (I,) * len(axes)
        return redistributed(x, shape, axes, own, layout)

    def with_own_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """The rows `x` that enter, with a gradient of the loss that this rank computes: a model gives that of the mean
        of all ranks' losses (`leave`), of which it is this rank's share. Layers before the model, another compiled one
        too, take the mean themselves. A loss of that gradient is the rank's own, too, of which the mean is taken.
        """
        own, fraction = x.view_as(x), self.fraction()

        def of_own_loss(gradient: torch.Tensor) -> torch.Tensor:
            found = gradient / fraction
            if found.requires_grad:
                found.register_hook(lambda second: second * fraction)
            return found

        own.register_hook(of_own_loss)
        return own

    def whole(self, x: Any, move: Callable[[torch.Tensor], torch.Tensor], axes: Sequence[Axis]) -> Any:
        """All ranks' parts of an argument, if it has parts. `move`: to the mesh's device."""
        is_part = isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
        return self.enter(move(x), axes, (I,) * len(axes)) if is_part else x

    def leave(
        self, x: torch.Tensor, shape: Sequence[int], axes: Sequence[Axis], layout: Layout, dim: int
    ) -> torch.Tensor:
        """This rank's rows of an output of global `shape` that lies in `layout`, the batch along `dim`.

        Backward of rows takes the mean over the parts, as DistributedDataParallel does: a loss that each rank computes
        of its rows stands for the mean of all ranks' losses, each by its share of the rows.
        """
        own = self.layout([axis.name for axis in axes], dim, shape[dim])
        rows = redistributed(x, shape, axes, layout, own)
        if rows.requires_grad and self.num_parts > 1:
            fraction = self.fraction()
            rows.register_hook(lambda gradient: gradient * fraction)
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
    layouts, carried = {}, dict(graph.carried)
    for i, value in enumerate(graph.outputs):
        if isinstance(value, Value) and value.shape and i not in carried:
            if parts is not None and i in rows:
                layouts[value.name] = parts.layout(axis_names, rows[i], value.shape[rows[i]])
            elif is_whole:
                layouts[value.name] = (I,) * len(axis_names)
    return layouts


def local_batch(mesh: DeviceMesh, batch: str | Sequence[str], shares: Shares = ()) -> LocalBatch | None:
    """The meaning of `batch`, an argument of `autopar.compile`: None if every rank gives the whole batch.

    AutoparError if it is neither "global", "local" nor axes of the mesh, or lacks the axis of the `shares`.
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
    own = next(((names[axis], rows, mesh.get_local_rank(axis)) for axis, rows in shares), None)
    if own is not None and own[0] not in batch:
        raise AutoparError(f"batch={tuple(batch)} lacks axis {own[0]}, on which ranks have shares of the batch")
    return LocalBatch(tuple(name for name in batch if sizes[name] > 1), int(parts), own) if parts > 1 else None
