"""Counts of the collectives that a rank really issues, taken where they reach the process group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.process_groups import find_joint_axes, find_level
from autopar.sbp.redistribute import Collective
from autopar.torch_compat import TorchDispatchMode, is_in_backward, is_traceable_wrapper_subclass_type, pytree

# Names of c10d and functional ops, without leading and trailing underscores, where they differ from autopar's.
KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}
RECEIVES = ("recv", "recv_any_source")
WITHOUT_DATA = ("barrier", "check_for_nan", "monitored_barrier", "wait_tensor", "wrap_tensor_autograd")


@contextmanager
def count_collectives(mesh: DeviceMesh) -> Iterator[list[Collective]]:
    """A context whose value is the list of the collectives that this rank issues inside, in order.

    A collective's `axes` are the axes of `mesh` whose process group was used, with the `level` of one that is a part of
    a collective over several, () for any other group; its phase is "backward" if autograd issued it, else "forward". A
    send within an axis is part of a permute, from each rank to the next; other sends and receives are no collectives.
    Barriers and waits move no tensor and are left out.
    """
    issued: list[Collective] = []
    with CountingMode(mesh, issued):
        yield issued


class CountingMode(TorchDispatchMode):
    """Lists in `issued` the collectives that are issued within it, and in `sends` the group and bytes of each send."""

    # This mode is below autograd and above the backends: `dist.*`, functional collectives, DTensor, DDP and FSDP all
    # pass through it.
    def __init__(self, mesh: DeviceMesh, issued: list[Collective]) -> None:
        super().__init__()
        self.axes: dict[str, tuple[int, ...]] = {mesh.get_group(axis).group_name: (axis,) for axis in range(mesh.ndim)}
        self.mesh = mesh
        self.issued = issued
        self.sends: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # DTensor and the like: their ops on plain tensors come through here later
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2].strip("_"), (*args, *(kwargs or {}).values()), out)
        return out

    def _count(self, name: str, arguments: tuple[Any, ...], out: Any) -> None:
        if name == "send" and (axes := self.axes.get(_group_name(arguments))):
            self.issued.append(Collective("permute", axes, _num_bytes(arguments, out), self.phase()))
        elif name == "send":
            self.sends.append((_group_name(arguments), _num_bytes(arguments, out)))
        elif name not in (*WITHOUT_DATA, *RECEIVES):
            group = _group_name(arguments)
            axes, level = self.axes.get(group) or find_joint_axes(self.mesh, group), -1
            if not axes:
                axes, level = find_level(self.mesh, group)
            kind = KINDS.get(name, name)
            num_bytes = _bytes_sent(arguments) if kind == "all_to_all" else _num_bytes(arguments, out)
            self.issued.append(Collective(kind, axes, num_bytes, self.phase(), level))

    @staticmethod
    def phase() -> str:
        """The phase of the op that is dispatched: "backward" if autograd runs it, else "forward"."""
        return "backward" if is_in_backward() else "forward"


def _group_name(arguments: tuple[Any, ...]) -> str:
    """The name of a collective's process group: c10d ops carry the group, functional ones its name as last string."""
    groups = [arg for arg in arguments if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
    if groups:
        return dist.ProcessGroup.unbox(groups[0]).group_name
    return [arg for arg in arguments if isinstance(arg, str)][-1]


def _num_bytes(arguments: tuple[Any, ...], out: Any) -> int:
    """Bytes of the larger side of a collective, whose outputs are arguments or its result."""
    return max(map(_bytes_of, (*arguments, out)))


def _bytes_sent(arguments: tuple[Any, ...]) -> int:
    """Bytes that a rank puts into an all-to-all, its last argument with tensors: of an uneven one all ranks together
    put in what all get out.
    """
    sides = [side for side in arguments if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(side))]
    return _bytes_of(sides[-1])  # possibly 0


def _bytes_of(side: Any) -> int:
    return sum(t.numel() * t.itemsize for t in pytree.tree_leaves(side) if isinstance(t, torch.Tensor))
