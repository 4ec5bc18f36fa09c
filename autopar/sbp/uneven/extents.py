"""`extents_of_parts`: the sizes of what the ranks of each axis hold together of a tensor."""

from collections.abc import Sequence

from autopar.sbp.axis import Axis
from autopar.sbp.placement import Layout


def extents_of_parts(shape: Sequence[int], axes: Sequence[Axis], layout: Layout) -> list[int | None]:
    """For each axis that splits a tensor of global `shape`, the size of the dim that its ranks hold together; else
    None.
    """
    local, extents = list(shape), list[int | None]()
    for axis, placement in zip(axes, layout):
        extents.append(local[placement.dim] if placement.is_split else None)
        if placement.is_split:
            local[placement.dim] = axis.part_in(placement, local[placement.dim])
    return extents
