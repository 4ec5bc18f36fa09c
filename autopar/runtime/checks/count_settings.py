"""`settings_counted`: how often settings of DTensors were changed."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError


@functools.cache
def settings_counted() -> list[int]:
    """[how often `requires_grad` or `.data` of a DTensor of the process was set, or its content swapped, from now on].

    torch counts no such changes; to ask each parameter takes longer than all else that is asked before a call.
    """
    count, kind = [0], DTensor

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def set_and_count(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return function(*args, **kwargs)

        return set_and_count

    for name in ("requires_grad", "data"):
        member: Any = getattr(kind, name)
        setattr(kind, name, property(member.__get__, counted(member.__set__)))
    for name in ("requires_grad_", "detach_"):
        setattr(kind, name, counted(getattr(torch.Tensor, name)))
    torch.utils.swap_tensors = counted(_among_alike(torch.utils.swap_tensors))
    return count


def _among_alike(swap: Callable[..., Any]) -> Callable[..., Any]:
    """`swap_tensors` that refuses a DTensor and a plain tensor by name, of which torch says that their slots differ."""

    @functools.wraps(swap)
    def swapped(t1: torch.Tensor, t2: torch.Tensor) -> Any:
        if isinstance(t1, DTensor) != isinstance(t2, DTensor):
            x = t1 if isinstance(t1, DTensor) else t2
            raise AutoparError(
                f"torch.utils.swap_tensors of a DTensor of shape {tuple(x.shape)}, of which each rank has a part, and a"
                " plain tensor: expected two DTensors. Give the plain one to model.load_state_dict({name: tensor},"
                " strict=False), or swap nn.Parameter(distribute_tensor(tensor, x.device_mesh, x.placements))"
            )
        return swap(t1, t2)

    return swapped
