"""State that an export would lose silently: hooks on gradients and buffers that change shape are refused by name.

Other buffers that the forward replaces are written back.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from autopar.errors import AutoparError, TraceError
from autopar.torch_compat import backward_hooks_of_all_modules

_IN_FORWARD = (
    "{} in forward is not kept: let a custom torch.autograd.Function change the gradient in its backward, or read the"
    " gradient of an output after backward"
)
_BACKWARD = (
    "torch.autograd.{} in forward is not recorded: return what is differentiated, and call"
    " torch.autograd.grad(..., create_graph=True) on what the compiled model gives"
)


def check_no_gradient_hooks(model: nn.Module) -> None:
    """AutoparError for a hook on gradients that was set before: a generated program calls no modules and has tensors
    of its own.
    """
    for hooks, of in _gradient_hooks(model):
        for hook in hooks:
            raise AutoparError(
                f"{of} has a hook on gradients, {_place(hook)}, which autopar.compile cannot keep. Of a parameter, set"
                " it on the compiled model's, which is a DTensor; of a module or a tensor within, let a custom"
                " torch.autograd.Function change the gradient in its backward; or remove it"
            )


def _gradient_hooks(model: nn.Module) -> Iterator[tuple[Iterable[Callable[..., Any]], str]]:
    for fqn, x in (*model.named_parameters(), *model.named_buffers()):
        yield (x._backward_hooks or {}).values(), f"parameter {fqn}"
        yield (x._post_accumulate_grad_hooks or {}).values(), f"parameter {fqn}"
    for fqn, module in model.named_modules():
        name = f"module {fqn}" if fqn else "the model"
        yield (*module._backward_hooks.values(), *module._backward_pre_hooks.values()), name
    yield backward_hooks_of_all_modules(), "every module"


def _place(hook: Any) -> str:
    """`scale (train.py:41)`."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    code, name = getattr(function, "__code__", None), getattr(function, "__qualname__", type(hook).__qualname__)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else name


@contextmanager
def losses_refused(model: nn.Module) -> Iterator[None]:
    """While a model is exported, raise TraceError, in the model's line, for what the export would lose; buffers that
    the forward replaces are written back at its end.
    """
    with ExitStack() as stack:
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            stack.enter_context(patch.object(torch.Tensor, name, _refusal(_IN_FORWARD.format(f"tensor.{name}"))))
        name = "register_multi_grad_hook"
        stack.enter_context(patch.object(torch.autograd.graph, name, _refusal(_IN_FORWARD.format(name))))
        for name in ("grad", "backward"):
            stack.enter_context(patch.object(torch.autograd, name, _refusal(_BACKWARD.format(name))))
        buffers = _Replaced({id(module): fqn for fqn, module in model.named_modules()}, model)
        stack.callback(register_module_buffer_registration_hook(buffers.note).remove)
        stack.callback(model.register_forward_hook(buffers.write_back).remove)
        yield


@dataclass
class _Replaced:
    """Buffers to which the forward assigns: torch.export keeps those of the outermost module only."""

    fqns: dict[int, str]  # by identity of a module
    model: nn.Module
    first: dict[tuple[int, str], tuple[nn.Module, torch.Tensor | None]] = field(default_factory=dict)

    def note(self, module: nn.Module, name: str, value: torch.Tensor | None) -> None:
        """TraceError if a buffer is replaced by one that cannot be written back to it."""
        if id(module) not in self.fqns or name not in module._buffers:
            return
        fqn, before = f"{self.fqns[id(module)]}.{name}".removeprefix("."), module._buffers[name]
        is_misplaced = module is self.model and None in module._buffers.values()  # torch.export then takes another one
        if _described(before) != _described(value) or is_misplaced:
            raise TraceError(
                f"the forward replaces buffer {fqn}, {_described(before)}, by {_described(value)}; a plan needs fixed"
                " shapes: register all buffers with the shapes and dtypes that they have later (a table that is made"
                " once: in __init__), or hand the state in as an argument and return it"
            )
        self.first.setdefault((id(module), name), (module, before))

    def write_back(self, *args: Any) -> None:
        """Write what the buffers are now to those that they were at first."""
        with torch.no_grad():
            for (_, name), (module, before) in self.first.items():
                now, module._buffers[name] = module._buffers[name], before
                if before is not None and now is not None and now is not before:
                    before.copy_(now)
        self.first.clear()


def _refusal(message: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TraceError(message)

    return refuse


def _described(x: torch.Tensor | None) -> str:
    return "None" if x is None else f"{x.dtype} of shape {list(x.shape)}"
