"""State that an export would lose silently: hooks on gradients, hooks that only observe, buffers that change shape, and
random numbers that are not torch's are refused by name; so are models that cannot be taken as they are given.

Other buffers that the forward replaces are written back.
"""

import builtins
import functools
import inspect
import io
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autopar.errors import AutoparError, TraceError, is_pythons, is_users, warn
from autopar.ir.gradients.gradient_op import gradients_kept
from autopar.ir.gradients.transforms import transforms_kept
from autopar.ir.guards.assignments import assignments_kept
from autopar.ir.guards.kept_losses import values_kept
from autopar.ir.guards.packed_sequences import sequences_kept_padded
from autopar.ir.guards.tensors_of_tensors import tensors_stacked
from autopar.ir.numbers.drawn_numbers import DRAWN, draws_compared, refused_by_torch
from autopar.torch_compat import FakeTensor, hooks_of_all_modules, is_wrapped_by_torch_compile

_IN_FORWARD = (
    "{} in forward is not kept: let a custom torch.autograd.Function change the gradient in its backward, or read the"
    " gradient of an output after backward"
)
_RETAINED = (
    "tensor.retain_grad in forward is not kept: return the tensor, and call retain_grad() on what the compiled model"
    " gives"
)
_BACKWARD = (
    "torch.{} in forward is not recorded: take the gradient by torch.autograd.grad(..., create_graph=True), which"
    " returns it"
)
_SEEDED = (
    "torch.manual_seed in forward would run while the model is traced and at no call: draw with that seed outside, and"
    " hand the numbers in as an argument or keep them in a buffer"
)
_REPLACED_DATA = (
    "the forward sets the .data of a tensor to no new one of its shape and dtype: expected new content, in memory"
    " of its own; write it in place, by copy_ under torch.no_grad(), or around the call"
)
_READ_FILE = (
    "forward reads a file, {}, while it is traced: what it makes of that is part of the program, and no call reads"
    " it again. Read it in __init__ or in the script, and keep what it says in an attribute, a buffer or an argument"
)
_MOVED = (
    "{}.to(...) in forward gives the module another device, dtype or layout, which a program does not: call it before"
    " autopar.compile"
)
_DATA = inspect.getattr_static(torch.Tensor, "data")
_WRITES = frozenset(("__set__", "__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow"))))


def check_given_model(model: nn.Module) -> None:
    """AutoparError for a lazy module that has no parameters yet, a module that torch.compile wraps or torch.jit made,
    and a hook on gradients that was set before: a generated program calls no modules and has tensors of its own.
    """
    for fqn, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x):
            raise AutoparError(
                f"{fqn} is not initialised: its module is lazy and learns its shape at the first call. Call the model"
                " once, on one device, before autopar.compile, or give the module its sizes (nn.Linear in place of"
                " nn.LazyLinear)"
            )
    for fqn, module in model.named_modules():
        if is_wrapped_by_torch_compile(module):
            of, inner = (f"module {fqn}", f"model.{fqn}._orig_mod") if fqn else ("the model", "model._orig_mod")
            raise AutoparError(
                f"{of} is what torch.compile returned: expected modules as written. Give autopar.compile the module in"
                f" it, {inner}, and call torch.compile on what autopar.compile returns, or on nothing"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise AutoparError(
                f"{f'module {fqn}' if fqn else 'the model'} is what torch.jit.script, trace or load returned: expected"
                " modules as written. Give autopar.compile the module that it was made of; functions may be scripted"
            )
    _check_hooks(_gradient_hooks(model))


def check_modules_traced(model: nn.Module) -> None:
    """AutoparError for a hook on gradients of a module, which was set since the model was given: it would not run."""
    _check_hooks(_gradient_hooks_of_modules(model))


def _check_hooks(found: Iterable[tuple[Iterable[Callable[..., Any]], str]]) -> None:
    for hooks, of in found:
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
    yield from _gradient_hooks_of_modules(model)


def _gradient_hooks_of_modules(model: nn.Module) -> Iterator[tuple[Iterable[Callable[..., Any]], str]]:
    for fqn, module in model.named_modules():
        name = f"module {fqn}" if fqn else "the model"
        yield (*module._backward_hooks.values(), *module._backward_pre_hooks.values()), name
    for hooks in hooks_of_all_modules("backward"):
        yield [hook for hook in hooks.values() if not is_of_torch(hook)], "every module"


def is_of_torch(hook: Any) -> bool:
    """Whether a hook of all modules is one by which torch counts or traces calls (FlopCounterMode, CommDebugMode)."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")


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
    the forward replaces are written back at its end. Losses that look at values are written out.
    """
    with ExitStack() as stack:
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            stack.enter_context(patch.object(torch.Tensor, name, _refusal(_IN_FORWARD.format(f"tensor.{name}"))))
        stack.enter_context(patch.object(torch.Tensor, "retain_grad", _refusal(_RETAINED)))
        name = "register_multi_grad_hook"
        stack.enter_context(patch.object(torch.autograd.graph, name, _refusal(_IN_FORWARD.format(name))))
        for owner, name in ((torch.autograd, "autograd.backward"), (torch.Tensor, "Tensor.backward")):
            stack.enter_context(patch.object(owner, "backward", _refusal(_BACKWARD.format(name))))
        stack.enter_context(patch.object(torch.Tensor, "data", property(_get_data, _set_data)))
        stack.enter_context(patch.object(torch.Tensor, "__deepcopy__", _copied(torch.Tensor.__deepcopy__)))
        stack.enter_context(patch.object(nn.Module, "to", _moved(nn.Module.to)))
        stack.enter_context(gradients_kept())
        stack.enter_context(transforms_kept())
        stack.enter_context(sequences_kept_padded())
        stack.enter_context(assignments_kept())
        stack.enter_context(tensors_stacked())
        stack.enter_context(patch.object(torch, "manual_seed", _refusal(_SEEDED)))
        stack.enter_context(values_kept())
        stack.enter_context(_trackers_left_out())
        for owner in (builtins, io):
            stack.enter_context(patch.object(owner, "open", _told(owner.open)))
        stack.enter_context(_observers_refused(model))
        stack.enter_context(_other_randomness_refused(model))
        buffers = _Replaced({id(module): fqn for fqn, module in model.named_modules()}, model)
        stack.callback(register_module_buffer_registration_hook(buffers.note).remove)
        stack.callback(model.register_forward_hook(buffers.write_back).remove)
        yield


@contextmanager
def _trackers_left_out() -> Iterator[None]:
    """Inside, hooks of all modules by which torch counts calls see none: a trace is no part of a step."""
    with ExitStack() as stack:
        for hooks in (*hooks_of_all_modules("forward"), *hooks_of_all_modules("backward")):
            everyone = dict(hooks)
            stack.callback(hooks.update, everyone)
            stack.callback(hooks.clear)
            for key in [key for key, hook in everyone.items() if is_of_torch(hook)]:
                del hooks[key]
        yield


@contextmanager
def _other_randomness_refused(model: nn.Module) -> Iterator[None]:
    """TraceError if the forward goes by what it draws from the generators of Python or NumPy: each call would get the
    same numbers.
    """
    before: dict[str, Any] = {}
    with ExitStack() as stack, ExitStack() as forward:

        def begin(*_: Any) -> None:
            before.update(_generators())
            forward.enter_context(draws_compared())

        def compare(*_: Any) -> None:
            forward.close()
            for name, state in _generators().items():
                if state != before.get(name, state):
                    raise TraceError(DRAWN.format(name))

        stack.callback(model.register_forward_pre_hook(begin).remove)
        stack.callback(model.register_forward_hook(compare).remove)
        with refused_by_torch():
            yield


def _generators() -> dict[str, Any]:
    """The states of the random generators that torch does not know, by name."""
    numpy = sys.modules.get("numpy")
    states = {} if numpy is None else {"numpy.random": pickle.dumps(numpy.random.get_state(legacy=False))}
    return states | {"Python's random": random.getstate()}


@contextmanager
def _observers_refused(model: nn.Module) -> Iterator[None]:
    """TraceError for a forward hook that neither returns nor changes anything: it would run while the model is traced
    and at no call.

    Those of transformers collect what the model returns (`output_hidden_states`), so that the program has it.
    """
    with ExitStack() as stack:
        for fqn, module in model.named_modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks) if module is not model else ():
                stack.callback(hooks.update, dict(hooks))
                own = {key: hook for key, hook in hooks.items() if not _is_of_transformers(hook)}
                hooks.update({key: _acting(hook, module, fqn) for key, hook in own.items()})
        yield


def _is_of_transformers(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _acting(hook: Callable[..., Any], module: nn.Module, fqn: str) -> Callable[..., Any]:
    """`hook`; TraceError once it turns out to do nothing that a program has."""

    @functools.wraps(hook)
    def checked(*args: Any, **kwargs: Any) -> Any:
        before = _attributes(module)
        with _Writes() as writes:
            result = hook(*args, **kwargs)
        if result is None and not writes.found and _attributes(module) == before:
            raise TraceError(
                f"module {fqn} has a forward hook that returns nothing, {_place(hook)}: it would run while the model is"
                " traced, on tensors without values, and at no call. Remove it, and return what it reads from the"
                " forward; or register it on the compiled model itself, where hooks run at every call"
            )
        return result

    return checked


class _Writes(TorchFunctionMode):
    """Notes whether a tensor is written to."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.startswith("__")
        self.found |= is_in_place or name in _WRITES or "out" in (kwargs or {})
        return func(*args, **(kwargs or {}))


def _attributes(module: nn.Module) -> list[tuple[str, int]]:
    tables = (module.__dict__, module._parameters, module._buffers, module._modules)
    return [(name, id(x)) for table in tables for name, x in table.items()]


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


def _get_data(x: torch.Tensor) -> torch.Tensor:
    """`x.detach()`, which is recorded, in code that is not torch's own: both share the memory and have no gradient."""
    is_of_torch = sys._getframe(1).f_globals.get("__name__", "").split(".")[0] == "torch"
    return _DATA.__get__(x) if is_of_torch or not isinstance(x, FakeTensor) else x.detach()


def _set_data(x: torch.Tensor, data: torch.Tensor) -> None:
    """`x.data = data`: a write of new content, after which no other tensor has its memory."""
    if not isinstance(x, nn.Parameter | FakeTensor):
        return _DATA.__set__(x, data)
    if _described(x) != _described(data) or isinstance(data, nn.Parameter) or data._is_view():
        raise TraceError(_REPLACED_DATA)
    with torch.no_grad():
        x.copy_(data)


def _copied(original: Callable[..., Any]) -> Callable[..., Any]:
    """`copy.deepcopy` of a tensor, or of a layer's weights, in the forward: no gradient goes from the copy to it."""

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not isinstance(self, FakeTensor) or not self.is_leaf:
            return original(self, memo)
        return memo.setdefault(id(self), self.detach().clone())

    return deepcopy


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.to` of the forward, `self.layer.to(x.device)`: nothing if all is there already."""

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        tensors = [*self.parameters(), *self.buffers()]
        if not any(isinstance(x, FakeTensor) for x in tensors):
            return original(self, *args, **kwargs)
        wanted = [x for x in (*args, *kwargs.values()) if x is not None and not isinstance(x, bool)]
        if all(_is_as(x, each) for x in tensors for each in wanted):
            return self
        raise TraceError(_MOVED.format(type(self).__name__))

    return to


def _is_as(x: torch.Tensor, wanted: Any) -> bool:
    """Whether `x` has the dtype, device or layout that is wanted, or those of a tensor."""
    if isinstance(wanted, torch.Tensor):
        return _is_as(x, wanted.dtype) and _is_as(x, wanted.device)
    if isinstance(wanted, torch.dtype):
        return x.dtype == wanted or not x.is_floating_point()
    if isinstance(wanted, torch.memory_format):
        return wanted == torch.preserve_format
    device = torch.device(wanted)
    return x.device.type == device.type and (device.type == "cpu" or device.index in (None, x.device.index))


def _told(original: Callable[..., Any]) -> Callable[..., Any]:
    """`open`, which warns if a file is read by other code than torch's, which reads sources."""

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        while is_pythons(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        if "r" in mode and is_users(frame.f_code.co_filename) and not str(file).endswith(".py"):
            warn(_READ_FILE.format(file))
        return original(file, mode, *args, **kwargs)

    return opened


def _refusal(message: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TraceError(message)

    return refuse


def _described(x: torch.Tensor | None) -> str:
    return "None" if x is None else f"{x.dtype} of shape {list(x.shape)}"
