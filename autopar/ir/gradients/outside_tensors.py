"""Tensors that need a gradient and are neither parameters of a model nor arguments of a call: refused by name, since an
export takes them as constants, which get none.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.torch_compat import FakeTensor, disable_proxy_modes_tracing, pytree, without_dispatch_modes

_LOST = (
    "{} of shape {} needs a gradient, and is neither a parameter of the model nor an argument of the call: it would get"
    " none. Register it (self.weight = nn.Parameter(...), nn.ParameterList in place of a list), or hand it in as an"
    " argument, to which its gradient goes; or read it by .detach() if it is to have none"
)


class OutsideGradientsRefused(TorchFunctionMode):
    """Inside, the forward of a model without data raises TraceError where it would give a tensor outside a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (found := [x for x in _tensors((args, kwargs)) if _is_outside(x)]) or not torch.is_grad_enabled():
            return result
        if any(not _has_values(x) for x in _tensors((result,))) and _reaches(func, args, kwargs or {}):
            kind = "a parameter" if isinstance(found[0], nn.Parameter) else "a tensor"
            raise TraceError(_LOST.format(kind, tuple(found[0].shape)))
        return result


def _tensors(items: Any) -> Iterator[torch.Tensor]:
    """The tensors in `items`. A number of the call is not asked for its class: it would count as read."""
    for item in items.values() if isinstance(items, dict) else items:
        if issubclass(type(item), torch.Tensor):
            yield item
        elif issubclass(type(item), (list, tuple, dict)):
            yield from _tensors(item)


def _has_values(x: torch.Tensor) -> bool:
    return not isinstance(x, FakeTensor) and not x.is_meta


def _is_outside(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, nn.Parameter) and x.requires_grad and _has_values(x)


def _reaches(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result of `func` depends on those outside among its arguments in a way that autograd follows."""

    def alone(x: torch.Tensor) -> torch.Tensor:
        like = torch.empty(tuple(map(int, x.shape)), dtype=x.dtype, device="meta")
        return like.requires_grad_() * 1 if _is_outside(x) else like

    with disable_proxy_modes_tracing(), without_dispatch_modes():
        args, kwargs = pytree.tree_map_only(torch.Tensor, alone, (args, kwargs))
        return any(x.requires_grad for x in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor))
