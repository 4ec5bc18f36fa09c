"""`tensors_stacked`: `torch.tensor([a, b])` of tensors, whose numbers torch reads one by one, is their stack."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autopar.torch_compat import FakeTensor, pytree


@contextmanager
def tensors_stacked() -> Iterator[None]:
    """Inside, `torch.tensor` and `torch.as_tensor` take lists of tensors that have no values."""
    with (
        patch.object(torch, "tensor", _stacking(torch.tensor)),
        patch.object(torch, "as_tensor", _stacking(torch.as_tensor)),
    ):
        yield


def _stacking(original: Callable[..., Any]) -> Callable[..., Any]:
    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves(data) if isinstance(data, list | tuple) else ()
        if args or not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return original(data, *args, **kwargs)
        kind = functools.reduce(torch.promote_types, (_dtype_of(leaf) for leaf in leaves))
        made = _stacked(data).to(kwargs.get("device"), kwargs.get("dtype") or kind)
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    return tensor


def _dtype_of(leaf: Any) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf).dtype


def _stacked(data: Any) -> torch.Tensor:
    """The numbers of a tensor, of a list of such, or of a number, without gradients."""
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(each) for each in data])
    return data.detach() if isinstance(data, torch.Tensor) else torch.full((), data)
