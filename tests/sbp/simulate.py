"""A mesh of ranks inside one process: cut a tensor into parts by a layout, run a function per rank, join the parts."""

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded  # ranks as threads, for tests only

from autopar.sbp.convert import Axis, joint_axis
from autopar.sbp.placement import Layout, Placement

Coordinate = tuple[int, ...]
Parts = Mapping[Coordinate, torch.Tensor]


def cut(x: torch.Tensor, layout: Layout, mesh_shape: tuple[int, ...]) -> dict[Coordinate, torch.Tensor]:
    """Each rank's part of `x`; pending sums are random terms, the same on all ranks of an
    axis on which `x` is whole.
    """
    if not layout:
        return {(): x}
    if layout[0].kind in "IR":
        inner = [cut(x, layout[1:], mesh_shape[1:])] * mesh_shape[0]
    else:
        inner = [cut(piece, layout[1:], mesh_shape[1:]) for piece in _cut_once(x, layout[0], mesh_shape[0])]
    return {(index, *at): part.clone() for index, parts in enumerate(inner) for at, part in parts.items()}


def _cut_once(x: torch.Tensor, placement: Placement, size: int) -> list[torch.Tensor]:
    if placement.kind == "S":
        units, unit = x.shape[placement.dim] // placement.unit, placement.unit
        assert units * unit == x.shape[placement.dim], f"{tuple(x.shape)} has no whole units of {placement}"
        starts = [min(units, -(-units // size) * index) * unit for index in range(size + 1)]
        return [x.narrow(placement.dim, a, b - a) for a, b in itertools.pairwise(starts)]
    noise = [
        torch.randn_like(x) if x.is_floating_point() or x.is_complex() else torch.randint_like(x, 5)
        for _ in range(size - 1)
    ]
    return [*noise, x - sum(noise)] if noise else [x]


def join(parts: Parts, layout: Layout) -> torch.Tensor:
    """Inverse of `cut`; what is whole must be equal on all ranks."""
    for axis in reversed(range(len(layout))):
        groups: dict[Coordinate, list[torch.Tensor]] = {}
        for at, part in sorted(parts.items()):
            groups.setdefault(at[:axis], []).append(part)
        parts = {at: _join_once(group, layout[axis]) for at, group in groups.items()}
    return parts[()]


def _join_once(group: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    if placement.kind == "S":
        return torch.cat(group, placement.dim)
    if placement.kind == "P":
        return sum(group[1:], group[0])
    for other in group[1:]:
        torch.testing.assert_close(
            other, group[0], rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"whole on all ranks: {m}"
        )
    return group[0]


def on_ranks(function: Callable[[Coordinate], Any], mesh_shape: tuple[int, ...]) -> dict[Coordinate, Any]:
    """`function(coordinate)` for every rank, one after the other."""
    return {at: function(at) for at in itertools.product(*map(range, mesh_shape))}


# What was sent from a thread of a group to another, which has collectives only: by members, sender and receiver.
_SENT: dict[tuple, queue.SimpleQueue] = defaultdict(queue.SimpleQueue)


def _send(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
    _SENT[*dist.get_process_group_ranks(group), group.rank(), peer].put(tensors[0].clone())
    return threaded.ret_work(tensors)


def _receive(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
    tensors[0].copy_(_SENT[*dist.get_process_group_ranks(group), peer, group.rank()].get(timeout=60))
    return threaded.ret_work(tensors)


threaded.ProcessLocalGroup.send, threaded.ProcessLocalGroup.recv = _send, _receive


def on_threads(
    function: Callable[[Coordinate, tuple[Axis, ...]], Any],
    mesh_shape: tuple[int, ...],
    joint: Sequence[tuple[int, ...]] = (),
) -> dict[Coordinate, Any]:
    """`function(coordinate, axes)` for every rank, each on a thread of its own and with working process groups; `axes`
    are those of the mesh, then each of the `joint` sets of several as one."""
    places = list(itertools.product(*map(range, mesh_shape)))
    store, results, errors = dist.HashStore(), {}, []

    def body(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=len(places), store=store)
            results[places[rank]] = function(places[rank], _axes(places, places[rank], mesh_shape, joint))
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # group names are looked up per thread
    world = threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    _SENT.clear()
    try:
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(places))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        del world
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    real = [error for error in errors if not isinstance(error, SystemExit)]
    if real:
        raise real[0]
    return results


def _axes(
    places: list[Coordinate], mine: Coordinate, mesh_shape: tuple[int, ...], joint: Sequence[tuple[int, ...]]
) -> tuple[Axis, ...]:
    single = tuple(
        Axis(f"a{axis}", size, mine[axis], _group(places, mine, (axis,))) for axis, size in enumerate(mesh_shape)
    )
    return single + tuple(joint_axis([single[axis] for axis in axes], _group(places, mine, axes)) for axes in joint)


def _group(places: list[Coordinate], mine: Coordinate, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """Every rank makes every group, in the same order."""

    def outside(at: Coordinate) -> Coordinate:
        return tuple(index for axis, index in enumerate(at) if axis not in axes)

    members: dict[Coordinate, list[int]] = {}
    for rank, at in enumerate(places):
        members.setdefault(outside(at), []).append(rank)
    groups = {rest: dist.new_group(members[rest]) for rest in sorted(members)}
    return groups[outside(mine)]
