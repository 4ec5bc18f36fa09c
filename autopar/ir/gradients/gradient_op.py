"""While a model is exported, each call of `torch.autograd.grad` in its forward is recorded as one op.

torch.export records no backward: it would take the gradients for constants. `autopar.gradient` stands for them until
the graph is built, where `written_out` replaces it by the ops of the backward.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx.node import has_side_effect

from autopar.errors import TraceError
from autopar.ir.graph import resolve
from autopar.torch_compat import disable_proxy_modes_tracing, peek_interpreter_stack

GRADIENT = "autopar.gradient.default"
TRACKED, FROZEN = "autopar.note_tracked.default", "autopar.note_frozen.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] directions, bool[] are_leaves) -> Tensor[]")
for _name in ("note_tracked", "note_frozen"):
    _LIBRARY.define(f"{_name}(Tensor self) -> ()")
    _LIBRARY.impl(_name, lambda self: None, "CompositeExplicitAutograd")
    has_side_effect(getattr(torch.ops.autopar, _name).default)
_GRAD = torch.autograd.grad  # as it is before an export replaces it
_REQUIRES_GRAD: Any = inspect.getattr_static(torch.Tensor, "requires_grad")
_REQUIRES_GRAD_ = torch.Tensor.requires_grad_
_OF_FUNC = (
    "transforms of torch.func in the model are not recorded: write the batched computation out, and take a gradient by"
    " torch.autograd.grad(y.sum(), x, create_graph=True)"
)


def _gradient(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    are_leaves: Sequence[bool],
) -> list[torch.Tensor]:
    return list(_GRAD(outputs, inputs, directions, create_graph=True))


_LIBRARY.impl("gradient", _gradient, "CompositeImplicitAutograd")


@contextmanager
def gradients_kept() -> Iterator[None]:
    """Inside, `torch.autograd.grad` is an op, and so is what makes a tensor one that autograd follows, or a parameter
    one that it does not.
    """
    with (
        patch.object(torch.autograd, "grad", _recorded),
        patch.object(torch.Tensor, "requires_grad_", _requires_grad_),
        patch.object(torch.Tensor, "requires_grad", _Tracked()),
    ):
        yield


class _Tracked:
    """`torch.Tensor.requires_grad` whose setting is an op. Of the class it is torch's own, by which function modes know
    that it is read.
    """

    def __get__(self, x: torch.Tensor | None, kind: Any = None) -> Any:
        return _REQUIRES_GRAD if x is None else _REQUIRES_GRAD.__get__(x)

    def __set__(self, x: torch.Tensor, value: bool) -> None:
        _requires_grad_(x, value)


def _requires_grad_(x: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    is_new = requires_grad != _REQUIRES_GRAD.__get__(x)
    _REQUIRES_GRAD_(x, requires_grad)
    if is_new and (requires_grad or isinstance(x, nn.Parameter)) and peek_interpreter_stack() is None:
        resolve(TRACKED if requires_grad else FROZEN)(x)
    return x


def _recorded(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`, as an op of the tensors that it is given; errors as torch's own."""
    bound = inspect.signature(_GRAD).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if peek_interpreter_stack() is not None:
        raise TraceError(_OF_FUNC)
    if given["is_grads_batched"]:
        raise TraceError("torch.autograd.grad(is_grads_batched=True) is not recorded: call it for each direction")
    ends, starts, directions = (_listed(given[name]) for name in ("outputs", "inputs", "grad_outputs"))
    directions = directions or [None] * len(ends)
    fills = given["materialize_grads"]
    with disable_proxy_modes_tracing():  # tells which inputs are used, and raises what torch raises
        found = _GRAD(ends, starts, directions, True, True, allow_unused=True if fills else given["allow_unused"])
    used = [x for x, gradient in zip(starts, found) if gradient is not None]
    directions = [torch.ones_like(y) if d is None else d for y, d in zip(ends, directions)]
    made = resolve(GRADIENT)(ends, used, directions, [x.is_leaf for x in used]) if used else ()
    results = iter(made if given["create_graph"] else [x.detach() for x in made])
    missing = [torch.zeros_like(x) if fills and g is None else None for x, g in zip(starts, found)]
    return tuple(zero if g is None else next(results) for zero, g in zip(missing, found))


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, torch.Tensor) else list(given or ())
