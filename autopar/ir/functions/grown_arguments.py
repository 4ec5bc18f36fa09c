"""Arguments that a forward puts tensors into: a program takes tensors and gives tensors, so that the caller's own list
or dict would stay as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.torch_compat import pytree

_GROWN = (
    "the forward puts a tensor of shape {} into a {} that it is called with, and does not return it: that of the caller"
    " would stay as it is. Return the tensor, or the {} itself"
)


@contextmanager
def grown_arguments_refused(model: nn.Module) -> Iterator[None]:
    """TraceError if the forward of `model` leaves a tensor in a list or dict among its arguments that was not among
    them and is none of its results.
    """
    known: list[torch.Tensor] = []

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        known[:] = _tensors((args, kwargs))

    def compare(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        told = {id(x) for x in (*known, *_tensors(result))}
        for each in _containers((args, kwargs)):
            for x in each.values() if isinstance(each, dict) else each:
                if isinstance(x, torch.Tensor) and id(x) not in told:
                    kind = type(each).__name__
                    raise TraceError(_GROWN.format(tuple(x.shape), kind, kind))

    handles = (
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(compare, with_kwargs=True, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _containers(item: Any) -> Iterator[list | dict]:
    if isinstance(item, list | dict):
        yield item
    if isinstance(item, list | tuple | dict):
        for each in item.values() if isinstance(item, dict) else item:
            yield from _containers(each)


def _tensors(item: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor)]
