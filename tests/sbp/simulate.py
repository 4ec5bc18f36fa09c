"""Ranks as threads of one process, with working process groups: for local ops, which communicate."""

import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded  # ranks as threads, for tests only

from autopar.mesh import Shares
from autopar.sbp.axis import Axis, joint_axis
from autopar.sbp.proof.cut_and_join import Coordinate

# What was sent from a thread of a group to another, which has collectives only: by members, sender and receiver.
_SENT: dict[tuple, queue.SimpleQueue] = {}


def _between(group: Any, sender: int, receiver: int) -> queue.SimpleQueue:
    """The queue of both threads, which may ask for it at once: of a defaultdict each could get one of its own."""
    return _SENT.setdefault((*dist.get_process_group_ranks(group), sender, receiver), queue.SimpleQueue())


def _send(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
    _between(group, group.rank(), peer).put(tensors[0].clone())
    return threaded.ret_work(tensors)


def _receive(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
    tensors[0].copy_(_between(group, peer, group.rank()).get(timeout=60))
    return threaded.ret_work(tensors)


threaded.ProcessLocalGroup.send, threaded.ProcessLocalGroup.recv = _send, _receive


def on_threads(
    function: Callable[[Coordinate, tuple[Axis, ...]], Any],
    mesh_shape: tuple[int, ...],
    joint: Sequence[tuple[int, ...]] = (),
    shares: Shares = (),
) -> dict[Coordinate, Any]:
    """`function(coordinate, axes)` for every rank, each on a thread of its own and with working process groups; `axes`
    are those of the mesh, then each of the `joint` sets of several as one."""
    places = list(itertools.product(*map(range, mesh_shape)))
    store, results, errors = dist.HashStore(), {}, []

    def body(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=len(places), store=store)
            results[places[rank]] = function(places[rank], _axes(places, places[rank], mesh_shape, joint, dict(shares)))
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
    places: list[Coordinate],
    mine: Coordinate,
    mesh_shape: tuple[int, ...],
    joint: Sequence[tuple[int, ...]],
    shares: Mapping[int, tuple[int, ...]],
) -> tuple[Axis, ...]:
    single = tuple(
        Axis(f"a{axis}", size, mine[axis], _group(places, mine, (axis,)), shares=shares.get(axis, ()))
        for axis, size in enumerate(mesh_shape)
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
