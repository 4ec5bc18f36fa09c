"""Parts of unequal sizes: how large each rank's part of a dim is if the ranks do not divide it.

They are those of `torch.chunk`, and so of DTensor: as many as possible are as large as the first, the last is smaller,
and ranks behind it have none. Axes that split the same dim are nested, the outermost first. A rank's program has its
own sizes in place of global ones: the text has expressions, the same on all ranks (`PartSize`).
"""

from functools import lru_cache

from autopar.sbp.placement import Layout, Placement, S, local_shape


@lru_cache(maxsize=2**12)
def part_sizes(extent: int, axes: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
    """The sizes of all parts of a dim of size `extent` over nested axes of these sizes, in row-major order.

    Each is a multiple of `unit`.

    >>> part_sizes(10, (4,)), part_sizes(5, (4,)), part_sizes(10, (2, 2)), part_sizes(25 * 64, (4,), 64)
    ((3, 3, 3, 1), (2, 2, 1, 0), (3, 2, 3, 2), (448, 448, 448, 256))
    """
    size, *inner = axes
    units = extent // unit
    most = -(-units // size)
    sizes = tuple(unit * max(0, min(most, units - most * index)) for index in range(size))
    return sum((part_sizes(one, tuple(inner), unit) for one in sizes), ()) if inner else sizes


class PartSize(int):
    """The size of this rank's part of a dim whose parts differ; as a number, that of the largest, which is the first
    rank's but for shares.

    `splits`: the mesh axes that split it, outermost first, each with its placement, as one of dim 0.
    """

    extent: int
    splits: tuple[tuple[int, Placement], ...]

    def __new__(cls, extent: int, splits: tuple[tuple[int, Placement], ...], mesh_shape: tuple[int, ...]) -> "PartSize":
        largest = extent
        for axis, placement in splits:
            (largest,) = local_shape((largest,), (placement,), (mesh_shape[axis],))
        made = super().__new__(cls, largest)
        made.extent, made.splits = extent, splits
        return made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PartSize):
            return (self.extent, self.splits) == (other.extent, other.splits)
        return int(self) == other

    __hash__ = int.__hash__

    @property
    def text(self) -> str:
        """The number as source, with `self` a `GeneratedSelf`."""
        text = str(self.extent)
        for axis, placement in self.splits:
            unit = f", {placement.unit}" if placement.unit > 1 else ""
            text = f"self.axes[{axis}].{'share' if placement.shares else 'part'}({text}{unit})"
        return text


def part_size(extent: int, dim: int, layout: Layout, mesh_shape: tuple[int, ...]) -> int:
    """The size of a rank's part of dim `dim`: a `PartSize` if the parts differ, and always of shares."""
    own = tuple(
        (axis, S(0, placement.unit, placement.shares))
        for axis, (placement, size) in enumerate(zip(layout, mesh_shape))
        if placement.dim == dim and size > 1
    )
    found = PartSize(extent, own, mesh_shape)
    for axis, placement in own:
        if placement.shares or extent % (mesh_shape[axis] * placement.unit):
            return found
        extent //= mesh_shape[axis]
    return int(found)


def part_shape(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor of global `shape`, with a `PartSize` for each dim whose parts differ."""
    return tuple(part_size(extent, dim, layout, mesh_shape) for dim, extent in enumerate(shape))
