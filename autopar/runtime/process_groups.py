"""Process groups of several mesh axes together, made once for all programs on these ranks."""

from itertools import chain, combinations
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Rows = tuple[tuple[int, ...], ...]  # global ranks of each group, row-major over the axes

# The default group -> groups made in its lifetime. A communicator costs device memory, so that models on one mesh share
# theirs.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[Rows, dist.ProcessGroup]] = WeakKeyDictionary()


def joint_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of this rank and all that differ from it only on `axes`, ranks in row-major order.

    All ranks of the mesh must come here, with the same sets of axes in the same order. On a mesh of all ranks everybody
    makes every group, as DeviceMesh does. On a part of them, the others not knowing, only members make theirs.
    """
    rows = _rows(mesh, axes)
    known = _made.setdefault(dist.group.WORLD, {})
    if rows not in known:
        known[rows] = _make(rows, is_local=mesh.size() < dist.get_world_size())
    return known[rows]


def find_joint_axes(mesh: DeviceMesh, group_name: str) -> tuple[int, ...]:
    """The axes that the group called so stands for; () if it is none of `joint_group`."""
    known = _made.get(dist.group.WORLD, {})
    live = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    for axes in chain.from_iterable(combinations(live, size) for size in range(2, len(live) + 1)):
        group = known.get(_rows(mesh, axes))
        if group is not None and group.group_name == group_name:
            return axes
    return ()


def _rows(mesh: DeviceMesh, axes: tuple[int, ...]) -> Rows:
    """The groups: all of a mesh of all ranks, else this rank's."""
    num_members = 1
    for axis in axes:
        num_members *= mesh.size(axis)
    ranks = mesh.mesh.movedim(axes, tuple(range(mesh.ndim - len(axes), mesh.ndim))).reshape(-1, num_members).tolist()
    mine = [row for row in ranks if dist.get_rank() in row]
    return tuple(map(tuple, ranks if mesh.size() == dist.get_world_size() else mine))


def _make(rows: Rows, *, is_local: bool) -> dist.ProcessGroup:
    # torch sorts a group's ranks unless told otherwise, which only new versions can be
    order = {} if all(list(row) == sorted(row) for row in rows) else {"sort_ranks": False}
    made = [dist.new_group(list(row), use_local_synchronization=is_local, **order) for row in rows]
    return next(group for group, row in zip(made, rows) if dist.get_rank() in row)


def with_axis_names(mesh: DeviceMesh, axis_names: tuple[str, ...]) -> DeviceMesh:
    """`mesh` with names, over the groups it has; for its ranks alone to call: a new DeviceMesh makes groups with all
    ranks of the world, and the next group that all make would hang.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    ranks = mesh.mesh if mesh.ndim > 1 else None
    return DeviceMesh.from_group(
        groups if mesh.ndim > 1 else groups[0], mesh.device_type, ranks, mesh_dim_names=axis_names
    )


def with_axis_of_one(mesh: DeviceMesh, axis_name: str) -> DeviceMesh:
    """`mesh`, which has one axis, with another of size 1 behind it; for its ranks alone to call."""
    rows = ((dist.get_rank(),),)
    known = _made.setdefault(dist.group.WORLD, {})
    if rows not in known:
        known[rows] = _make(rows, is_local=True)
    ranks, names = mesh.mesh.unsqueeze(-1), (*mesh.mesh_dim_names, axis_name)
    return DeviceMesh.from_group([mesh.get_group(), known[rows]], mesh.device_type, ranks, mesh_dim_names=names)
