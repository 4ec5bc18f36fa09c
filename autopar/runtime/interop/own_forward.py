"""The `forward` of a sharded module: it shows the signature of the original, and may be replaced by another one."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from autopar.errors import AutoparError, TraceError, warn
from autopar.ir.export.meta_copy import bare as meta
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.export.refused_state import check_modules_traced
from autopar.ir.gradients.outside_tensors import OutsideGradientsRefused
from autopar.ir.guards.example_values import keep_value, stands_for
from autopar.ir.precision.mixed_precision import traced_in
from autopar.ir.trace_with_loss import recorded
from autopar.runtime.checks.module_changes import FORWARD, Changes
from autopar.runtime.dtensor_state import put
from autopar.runtime.interop.compiled_after import check_no_function_mode, check_not_traced
from autopar.runtime.interop.trainer_attributes import TrainerAttributes, as_of_all_parts
from autopar.runtime.local_batch import LocalBatch
from autopar.torch_compat import is_autocast_wrapper

_REPLACED = "_forward_is_replaced"  # the forward that is traced was set after autopar.compile


class CallRuntime(Protocol):
    """The part of a sharded module's runtime that its forward needs."""

    original: type[nn.Module]
    elsewhere: Mapping[str, torch.Tensor]
    parts: LocalBatch | None
    param_dtype: torch.dtype | None
    bare: nn.Module | None
    trains: bool
    changes: Changes

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any: ...


class OwnForward(nn.Module):
    """Mixed into a sharded module's class."""

    _autopar: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and "_autopar" in self.__dict__:
            _replace(self, value)
        else:
            super().__setattr__(name, value)


def forward_like(model: nn.Module) -> Callable[..., Any]:
    """The `forward` of a sharded class, which looks like that of `model`: trainers choose columns and loss by it."""
    shown = model.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_autopar" not in vars(self):  # the copy that is traced, whose forward calls the one that it replaced
            return type(self).forward(self, *args, **kwargs)
        runtime: CallRuntime = self._autopar
        check_not_traced("" if isinstance(kwargs, dict) else "torch.fx.symbolic_trace")
        if runtime.bare is not None:  # a forward that was set on the module calls the one that it replaced
            return runtime.original.forward(runtime.bare, *args, **kwargs)
        check_no_function_mode()
        kwargs = as_of_all_parts(kwargs, runtime.parts)
        if runtime.trains:
            return runtime.call(self, args, kwargs)
        with torch.no_grad():
            return runtime.call(self, args, kwargs)

    def described(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    functools.update_wrapper(forward, shown)
    vars(forward).pop("__signature__", None)
    # functools.wraps(model.forward) copies what is written on a function: a signature with self among it
    forward.__wrapped__ = described  # type: ignore[attr-defined]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(shown)
    if "self" in signature.parameters:
        own = own.replace(name="_self")
    if all(each.kind is not inspect.Parameter.POSITIONAL_ONLY for each in signature.parameters.values()):
        described.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *signature.parameters.values()]
        )
    return forward


class _Unset:
    """A name that a class lacks, though its bases have it."""

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        raise AttributeError


def own_members(model: nn.Module, sharded: type[nn.Module]) -> dict[str, Any]:
    """Members that `model` itself has under a public name of the class `sharded` that is mixed into its own: scripts
    call them so, therefore they stay. What trainers alone ask is answered for the compiled model.
    """
    original = type(model)
    kinds = itertools.takewhile(lambda kind: kind is not nn.Module, sharded.__mro__)
    answers = [kind for kind in kinds if kind is not TrainerAttributes]
    public = {name: None for kind in answers for name in vars(kind) if name[0] != "_" and not hasattr(nn.Module, name)}
    of_class = {name: inspect.getattr_static(original, name) for name in public if hasattr(original, name)}
    tables: tuple[dict[str, Any], ...] = vars(model), model._modules, model._parameters, model._buffers
    own = of_class | {name: _Unset() for name in public if any(name in table for table in tables)}
    if own:
        warn(
            f"{original.__name__} has {', '.join(own)} of its own, which the compiled model keeps: autopar's, of the"
            " same name, cannot be called; rename the model's own if you need it"
        )
    return own


@contextmanager
def as_written(module: nn.Module, runtime: CallRuntime, *, keeps_hooks: bool) -> Iterator[nn.Module]:
    """A copy of `module` without data, of its original class and with the forward that was set on it, to be traced.

    Its own hooks run around each call, unless `keeps_hooks`.
    """
    bare = skeleton(module, shared=[runtime])
    del bare._autopar
    bare.__class__ = runtime.original
    bare.__dict__.pop("forward", None)
    bare.__dict__.pop(_REPLACED, None)
    if FORWARD in bare.__dict__:
        bare.forward = bare.__dict__.pop(FORWARD)
    if not keeps_hooks:
        for hooks in (bare._forward_pre_hooks, bare._forward_hooks, bare._backward_pre_hooks, bare._backward_hooks):
            hooks.clear()
    copies = {id(x): keep_value(meta(x), stands_for(x)) for x in runtime.elsewhere.values()}  # which a trace may cast
    put(bare, {fqn: copies[id(x)] for fqn, x in runtime.elsewhere.items()})
    runtime.bare = bare
    try:
        yield bare
    finally:
        runtime.bare = None


def tracer(
    module: nn.Module, runtime: CallRuntime, loss_fn: Callable[..., Any] | None, examples: tuple[tuple, dict]
) -> Callable[..., Any]:
    """(how, *what else `how` takes) -> what `how` gives for the model as it is written, `loss_fn` and `examples`."""

    def trace(how: Callable[..., Any], *asked: Any) -> Any:
        with as_written(module, runtime, keeps_hooks=loss_fn is not None) as bare:
            check_modules_traced(bare)
            try:
                with OutsideGradientsRefused() if runtime.trains and how is not recorded else nullcontext():
                    return traced_in(runtime.param_dtype, how, bare, loss_fn, *examples, *asked)
            except TraceError as error:
                names = dict.fromkeys(
                    "forward" if name in (FORWARD, _REPLACED) else name for name in runtime.changes.last
                )
                if changed := ", ".join([*names][:3]):
                    raise TraceError(
                        f"{error}; the model was changed since it was planned ({changed}): do before autopar.compile"
                        " what replaces layers, as get_peft_model does"
                    ) from error
                raise

    return trace


def _replace(module: nn.Module, forward: Any) -> None:
    """Take `forward` for the one that is traced, from the next call on.

    The module's own again undoes that. What is only torch.autocast around its own runs at each call, around the
    program. AutoparError if the instance had a forward of its own when it was compiled.
    """
    own, present = type(module).forward, module.__dict__
    present.pop("forward", None)
    if getattr(forward, "__func__", None) is own and forward.__self__ is module:
        if present.pop(_REPLACED, False):
            del present[FORWARD]
        return
    if is_autocast_wrapper(forward):
        present["forward"] = forward
        return
    if FORWARD in present and _REPLACED not in present:
        raise AutoparError(
            f"forward of the compiled {type(module).__name__} was set again; the instance had a forward of its own when"
            " it was compiled, and which of the two the new one calls is not known: set it before autopar.compile"
        )
    present[FORWARD], present[_REPLACED] = forward, True
