"""Process groups of several mesh axes together, created once for all programs on these ranks."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.mesh import PIPELINE, stages_first_order
from autopar.torch_compat import default_store, num_groups

Rows = tuple[tuple[int, ...], ...]  # global ranks of each group, row-major over the axes
Copy = (
    int | tuple[Rows, int]
)  # which of several groups of the same ranks: a number, or whose parts they are and a level

# The default group -> groups created in its lifetime, by their ranks and their copy. A communicator takes device
# memory, so that models on one mesh share them.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Rows, Copy], dist.ProcessGroup]] = WeakKeyDictionary()
# The default group -> the first of the groups of several meshes, by their ranks.
_first: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def first_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The first group of the same ranks that this was called with; all of them call it for each of their meshes.

    torch keeps the layout of what an op gives for tensors on equal meshes, so that a gradient may lie on that of an
    earlier model, and on another one on ranks of other stages: they would wait for each other in different groups.
    """
    return _first.setdefault(_world(), {}).setdefault(tuple(dist.get_process_group_ranks(group)), group)


def joint_group(mesh: DeviceMesh, axes: tuple[int, ...], *, copy: int = 0) -> dist.ProcessGroup:
    """The group of this rank and all ranks that differ from it only on `axes`, in row-major order.

    Groups of different `copy` wait for nothing of one another. All ranks of the mesh must call this, with the same sets
    of axes in the same order. On a mesh of all ranks of the world every rank creates every group, as DeviceMesh does.
    On a mesh of some ranks only members create theirs, since the others do not call this.
    """
    return _group(mesh, _rows(mesh, axes), copy)


def level_groups(mesh: DeviceMesh, axes: tuple[int, ...], sizes: Sequence[int]) -> tuple[dist.ProcessGroup, ...]:
    """The groups of this rank within a `joint_group`, whose members are blocks within blocks of `sizes`, from the
    inside out: those within an innermost block, then those in the same place of other blocks. Called as `joint_group`.
    """
    rows = _rows(mesh, axes)
    return tuple(_group(mesh, _of_level(rows, sizes, level), (rows, level)) for level in range(len(sizes)))


def _of_level(rows: Rows, sizes: Sequence[int], level: int) -> Rows:
    """The groups of a level within `rows`.

    >>> _of_level(((0, 1, 2, 3),), (2, 2), 0), _of_level(((0, 1, 2, 3),), (2, 2), 1)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    stride, parts = math.prod(sizes[:level]), list[tuple[int, ...]]()
    for row in rows:
        block = stride * sizes[level]
        parts += [
            row[start + offset : start + block : stride]
            for start in range(0, len(row), block)
            for offset in range(stride)
        ]
    return tuple(parts)


def _group(mesh: DeviceMesh, rows: Rows, copy: Copy) -> dist.ProcessGroup:
    known = _made.setdefault(_world(), {})
    if (rows, copy) not in known:
        is_local = mesh.size() < dist.get_world_size()
        if is_local:
            rows_here = tuple(row for row in rows if dist.get_rank() in row)
            _agree_on_number(rows_here, copy)
            known[rows, copy] = _make(rows_here, is_local=True)
        else:
            known[rows, copy] = _make(rows, is_local=False)
    return known[rows, copy]


def find_joint_axes(mesh: DeviceMesh, group_name: str) -> tuple[int, ...]:
    """The axes of the group called `group_name`; () if `joint_group` did not create it."""
    known = _made.get(_world(), {})
    for axes in _sets_of_axes(mesh, least=2):
        group = known.get((_rows(mesh, axes), 0))
        if group is not None and group.group_name == group_name:
            return axes
    return ()


def find_level(mesh: DeviceMesh, group_name: str) -> tuple[tuple[int, ...], int]:
    """The axes and the level of the group called `group_name`; ((), -1) if `level_groups` did not create it."""
    known = _made.get(_world(), {})
    found = next((copy for (_, copy), group in known.items() if group.group_name == group_name), 0)
    if isinstance(found, int):
        return (), -1
    return next(axes for axes in _sets_of_axes(mesh, least=1) if _rows(mesh, axes) == found[0]), found[1]


def _sets_of_axes(mesh: DeviceMesh, least: int) -> Iterator[tuple[int, ...]]:
    live = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return chain.from_iterable(combinations(live, size) for size in range(least, len(live) + 1))


def _rows(mesh: DeviceMesh, axes: tuple[int, ...]) -> Rows:
    """The groups to create: all of a mesh of all ranks, else this rank's."""
    num_members = 1
    for axis in axes:
        num_members *= mesh.size(axis)
    ranks = mesh.mesh.movedim(axes, tuple(range(mesh.ndim - len(axes), mesh.ndim))).reshape(-1, num_members).tolist()
    mine = [row for row in ranks if dist.get_rank() in row]
    return tuple(map(tuple, ranks if mesh.size() == dist.get_world_size() else mine))


def _agree_on_number(rows: Rows, copy: Copy) -> None:
    """Give the members of each group as many groups, by groups of one, as that of them which knows most.

    torch names a group that only its members create by their ranks and by how many groups they know: members that know
    different numbers would wait for groups of different names.
    """
    store, here = default_store(), dist.get_rank()
    for row in rows:
        place = f"autopar/groups/{row}/{copy}"
        store.set(f"{place}/{here}", str(num_groups()))
        most = max(int(store.get(f"{place}/{rank}")) for rank in row)
        while num_groups() < most:
            dist.new_group([here], use_local_synchronization=True)


def _make(rows: Rows, *, is_local: bool) -> dist.ProcessGroup:
    # torch sorts a group's ranks unless told otherwise, which only new versions allow
    order: dict[str, Any] = {} if all(list(row) == sorted(row) for row in rows) else {"sort_ranks": False}
    made: list[Any] = [dist.new_group(list(row), use_local_synchronization=is_local, **order) for row in rows]
    return next(group for group, row in zip(made, rows) if dist.get_rank() in row)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "torch.distributed is initialised"
    return dist.group.WORLD


def with_axis_names(mesh: DeviceMesh, axis_names: tuple[str, ...]) -> DeviceMesh:
    """`mesh` with axis names, over its existing groups, so that only its ranks need to call this.

    A new DeviceMesh would create groups with all ranks of the world, and hang if some do not.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    ranks = mesh.mesh if mesh.ndim > 1 else None
    return DeviceMesh.from_group(
        groups if mesh.ndim > 1 else groups[0], mesh.device_type, ranks, mesh_dim_names=axis_names
    )


def with_stages_first(mesh: DeviceMesh) -> DeviceMesh:
    """`mesh` with its pipeline axis as the first, and without one of a single rank, over its existing groups; every
    rank keeps its place. MeshError if ranks do not ascend.
    """
    for axis in range(mesh.ndim):
        if not bool((mesh.mesh.diff(dim=axis) > 0).all()):
            raise MeshError(
                f"the ranks of mesh {mesh} do not ascend along axis {axis}; expected ascending ones, for the groups of"
                " torch have their ranks in that order, so that parts would lie elsewhere than the mesh says"
            )
    names = mesh.mesh_dim_names or ()
    order = stages_first_order(names)
    if PIPELINE in names and mesh.size(order[0]) == 1:  # one stage is a model without stages
        if mesh.ndim == 1:
            return with_axis_names(mesh, ("dp",))
        order = order[1:]
    if order == tuple(range(len(names))):
        return mesh
    axis_names = tuple(names[axis] for axis in order)
    groups = [mesh.get_group(axis) for axis in order]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=axis_names)
    ranks = mesh.mesh.permute(stages_first_order(names)).reshape([mesh.size(axis) for axis in order])
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=axis_names)


def with_axis_of_one(mesh: DeviceMesh, axis_name: str) -> DeviceMesh:
    """`mesh`, which has one axis, with another axis of size 1 behind it; only its ranks need to call this."""
    rows = ((dist.get_rank(),),)
    known = _made.setdefault(_world(), {})
    if (rows, 0) not in known:
        known[rows, 0] = _make(rows, is_local=True)
    assert mesh.mesh_dim_names is not None, "the mesh of a pipeline has names"
    ranks, names = mesh.mesh.unsqueeze(-1), (*mesh.mesh_dim_names, axis_name)
    return DeviceMesh.from_group([mesh.get_group(), known[rows, 0]], mesh.device_type, ranks, mesh_dim_names=names)
