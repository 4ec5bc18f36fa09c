"""What the ranks of a mesh must agree on before the first collective of the model."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def gather(mesh: DeviceMesh, item: Any) -> list[Any]:
    """`item` of every rank of the mesh, in rank order; any picklable object."""
    found = [item]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, found, group=group)
        found = [entry for row in rows for entry in row]
    return found


def from_first(mesh: DeviceMesh, item: Any) -> Any:
    """The first rank's `item`, on every rank."""
    box = [item]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
