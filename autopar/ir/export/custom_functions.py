"""While a model is exported, each call of a custom `torch.autograd.Function` is recorded as one op, and scripted
functions as the ops that they were written with.

torch.export would record what its forward does, and lose its backward. What is taken for granted is that the class is a
function of the tensors it is called with; whatever speaks against it raises TraceError.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import TraceError
from autopar.ir.export.fake_device import fake_like
from autopar.ir.export.source_lines import COMMUNICATES
from autopar.ir.function_ops import MADE_OF_NUMBERS, TENSOR, Application, is_constant, target_of
from autopar.ir.functions.one_device import in_function
from autopar.ir.graph import resolve
from autopar.torch_compat import (
    FunctionApply,
    TorchDispatchMode,
    disable_proxy_modes_tracing,
    functions_applied_by,
    is_traceable_wrapper_subclass,
    pytree,
    scripted,
    without_function_modes,
)

# Of tracing itself, and of torch's higher-order ops.
_INTERNAL = ("autopar.", "torch._")


@contextmanager
def functions_kept() -> Iterator[None]:
    """Calls of custom functions inside are ops of `ir.function_ops`; of reentrant checkpoints, what they checkpoint."""
    is_inside, tracing = False, threading.get_ident()

    def apply(original: FunctionApply, cls: type[torch.autograd.Function], *args: Any) -> Any:
        nonlocal is_inside
        if is_inside or cls.__module__.startswith(_INTERNAL) or threading.get_ident() != tracing:
            return original(*args)  # of another thread, such as one that writes a checkpoint
        if cls is CheckpointFunction:
            return _without_checkpoint(*args)
        is_inside = True
        try:
            return _applied(original, cls, args)
        finally:
            is_inside = False

    with functions_applied_by(apply), _scripts_as_written():
        yield


@contextmanager
def _scripts_as_written() -> Iterator[None]:
    """Inside, scripted functions run as at their first call. From the third on they are optimized, and differentiate
    themselves: their ops are recorded as of detached tensors, without a gradient.
    """
    functions: Any = scripted.get_functions()
    for function in functions:
        function._debug_flush_compilation_cache()
    with torch.jit.optimized_execution(False):
        yield


def _without_checkpoint(function: Callable[..., Any], preserves_rng: bool, *args: Any) -> Any:
    """The results of a checkpointed function, without gradient if no given tensor needs one, as in torch."""
    tracks = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and tracks):
        return function(*args)


def _applied(original: FunctionApply, cls: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
    name = cls.__qualname__
    if cls.__module__ == "torch.distributed.nn.functional":  # torch 2.12 and newer refuse it themselves
        raise TraceError(COMMUNICATES)
    for position, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor) and not is_constant(arg):
            raise TraceError(
                f"{name}.apply is called with a {type(arg).__name__} as argument {position}; a custom autograd.Function"
                " can be kept if it is called with tensors and plain constants: hand it the tensors that it reads"
            )
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    probe = _Probe()
    with disable_proxy_modes_tracing(), without_function_modes():
        copies = [fake_like(x).clone() for x in tensors]  # as a leaf, what needs a gradient cannot be written to
        given = iter(copies)
        probe.known = [*copies]
        with probe, in_function():
            result = original(*(next(given) if isinstance(arg, torch.Tensor) else arg for arg in args))
        _check(name, copies, probe)
    leaves = result if isinstance(result, tuple) else (result,)
    made = [x for x in leaves if isinstance(x, torch.Tensor)]
    if not made:
        raise TraceError(f"{name}.apply returns no tensor; expected a tensor or a tuple with tensors")
    template = tuple(TENSOR if isinstance(arg, torch.Tensor) else arg for arg in args)
    application = Application(cls, template, len(tensors), len(made), probe.is_random)
    outcome = resolve(target_of(application))(*tensors)
    results = iter([outcome] if len(made) == 1 else outcome)
    filled = tuple(next(results) if isinstance(x, torch.Tensor) else x for x in leaves)
    return filled if isinstance(result, tuple) else filled[0]


def _check(name: str, given: Sequence[torch.Tensor], probe: "_Probe") -> None:
    if any(x._version for x in given):
        raise TraceError(
            f"{name}.forward writes to a tensor that it is given (ctx.mark_dirty); return a new tensor instead"
        )
    if probe.foreign:
        raise TraceError(
            f"{name}.forward reads a tensor of shape {tuple(probe.foreign[0].shape)} that it is not called with (in"
            f" {probe.reader}); hand it to {name}.apply, so that its gradient and its layout are known"
        )


class _Probe(TorchDispatchMode):
    """Sees which tensors the ops inside read that are neither `known` nor
    made inside, and whether they draw random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: list[torch.Tensor] = []  # held, so that no other tensor gets the identity of one
        self.foreign: list[torch.Tensor] = []
        self.reader = ""
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [x for x in pytree.tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        if any(map(is_traceable_wrapper_subclass, read)):
            return NotImplemented  # the class calls ops on the tensors inside
        if func in MADE_OF_NUMBERS:  # inside, by torch.tensor
            self.known += read
        known = {x.untyped_storage()._cdata for x in self.known}
        foreign = [x for x in read if x.untyped_storage()._cdata not in known]
        if foreign and not self.foreign:
            self.foreign, self.reader = foreign, str(func)
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **(kwargs or {}))
        self.known += [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result
