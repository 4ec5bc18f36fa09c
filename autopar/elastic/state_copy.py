"""`StateCopy`: a copy of a state in the host's memory, which the next one is copied into."""

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.torch_compat import pytree


class StateCopy:
    """The memory of a copy of a state, kept from one checkpoint to the next: to copy into it takes a tenth of the time
    of making it anew, in which training waits.
    """

    def __init__(self) -> None:
        self._like: Any = None
        self._leaves: list[Any] = []

    def take(self, state: Any) -> Any:
        """A copy of `state`, nested lists and dicts of tensors and other items, that holds until the next call."""
        leaves, structure = pytree.tree_flatten(state)
        like = structure, [_kind(x) for x in leaves]
        if like != self._like:
            self._like, self._leaves = like, [_memory(x) for x in leaves]
        self._leaves = [_filled(kept, x) for kept, x in zip(self._leaves, leaves)]
        if any(isinstance(x, torch.Tensor) and x.is_cuda for x in leaves):
            torch.cuda.synchronize()
        return pytree.tree_unflatten(self._leaves, structure)


def _kind(x: Any) -> Any:
    """Equal for what has room in the same memory."""
    if isinstance(x, DTensor):
        return x._spec, x._local_tensor.shape, x.dtype
    return (x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x)


def _memory(x: Any) -> Any:
    if isinstance(x, DTensor):
        return DTensor.__new__(DTensor, _memory(x._local_tensor), x._spec, requires_grad=False)
    if isinstance(x, torch.Tensor):
        return torch.empty_like(x, device="cpu", requires_grad=False, pin_memory=x.is_cuda)
    return None


def _filled(kept: Any, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return copy.deepcopy(x)
    with torch.no_grad():
        if isinstance(x, DTensor):
            kept._local_tensor.copy_(x._local_tensor, non_blocking=True)
        else:
            kept.copy_(x, non_blocking=True)
    return kept
