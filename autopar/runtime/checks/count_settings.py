"""`settings_counted`: how often settings of DTensors were changed."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


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
    torch.utils.swap_tensors = counted(torch.utils.swap_tensors)
    return count
