"""`Axis`: a mesh axis as a rank sees it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from autopar.sbp.nested import Nest
from autopar.sbp.placement import Placement, S, shared_sizes
from autopar.sbp.uneven.parts import part_sizes


@dataclass(frozen=True, eq=False)
class Axis:
    """A mesh axis, or several as one, as seen by a rank, whose coordinate on it is `index`.

    Without a `group` the rank has no peers (a dry run): collectives return tensors of the right shape with arbitrary
    contents. `nest`: its groups of each link level, where some collectives are run level by level.
    `sizes`: of the axes that are taken as one. `shares`: of the batch, of an axis that has it in unequal parts.
    """

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None
    nest: Nest | None = None
    sizes: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    def parts(self, extent: int, placement: Placement) -> tuple[int, ...]:
        """The sizes of all ranks' parts of a dim of size `extent` in a split."""
        if placement.shares:
            return shared_sizes(extent, self.shares, placement.unit)
        return part_sizes(extent, self.sizes or (self.size,), placement.unit)

    def part(self, extent: int, unit: int = 1) -> int:
        """The size of this rank's part of a dim of size `extent`."""
        is_even = extent % (self.size * unit) == 0
        return extent // self.size if is_even else self.parts(extent, S(0, unit))[self.index]

    def share(self, extent: int, unit: int = 1) -> int:
        """The size of this rank's part of a dim of size `extent` in shares."""
        return shared_sizes(extent, self.shares, unit)[self.index]

    def part_in(self, placement: Placement, extent: int) -> int:
        """The size of this rank's part of a dim of size `extent` in a split."""
        return self.share(extent, placement.unit) if placement.shares else self.part(extent, placement.unit)


def joint_axis(axes: Sequence[Axis], group: dist.ProcessGroup | None, nest: Nest | None = None) -> Axis:
    """All ranks of `axes` as one axis, in row-major order, which must be the order of `group`."""
    index = 0
    for axis in axes:
        index = index * axis.size + axis.index
    sizes = tuple(axis.size for axis in axes)
    return Axis("+".join(axis.name for axis in axes), math.prod(sizes), index, group, nest, sizes)
