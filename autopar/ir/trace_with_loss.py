"""The graph of a model together with its loss function, with the FQNs of the model."""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, TraceError
from autopar.ir.export.run_export import DynamicDims
from autopar.ir.graph import Graph, Input, Value
from autopar.ir.kept_attributes import BESIDE
from autopar.ir.numbers.trace_numbers import graph_with_numbers
from autopar.ir.outline.export_once import Outline, export_outline
from autopar.ir.passes.normalise import normalise
from autopar.ir.rarely_collected import rarely_collected
from autopar.ir.sizes.check_repeats import check_repeats
from autopar.ir.sizes.recording import record_outline
from autopar.ir.sizes.sized_trace import SizedTrace
from autopar.ir.trace import to_graph, trace

LossFunction = Callable[[Any, Any], torch.Tensor]


@rarely_collected()
def trace_loss(
    model: nn.Module,
    loss_fn: LossFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outlined: Callable[..., Outline] = export_outline,
) -> Graph:
    """The graph of `loss_fn(model(*args[:-1], **kwargs), args[-1])`, whose only output is the loss.

    Otherwise as `trace`. Tensors of `loss_fn` (class weights) are constants. AutoparError if it has parameters to
    train, writes to its buffers or returns anything but a floating scalar.
    """
    if not args:
        raise AutoparError("with loss_fn= a call ends in the target, as its last positional argument; found none")
    _check_loss_function(loss_fn)
    whole = _WithLoss(model, loss_fn, len(args))
    try:
        graph = to_graph(whole, args, dict(sorted(kwargs.items())), outlined)
    except TraceError as error:
        if len(args) > 1:
            raise
        hint = (
            "with loss_fn= the last positional argument is the target, and the model was called without any; was the"
            " target left out?"
        )
        raise TraceError(f"{error} ({hint})") from error.__cause__
    return _finished(graph, whole)


def traced(model: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The graph of `model` with `loss_fn` as `trace_loss` gives it, or as `trace` if that is None."""
    return trace(model, args, kwargs) if loss_fn is None else trace_loss(model, loss_fn, args, kwargs)


def recorded(model: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The graph that `traced` gives, by recording the ops of one call in place of an export (`ir/sizes/recording.py`).

    TraceError where the forward cannot be recorded.
    """
    if loss_fn is None:
        return normalise(to_graph(model, args, dict(sorted(kwargs.items())), record_outline))
    return trace_loss(model, loss_fn, args, kwargs, record_outline)


def check_alike(model: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """TraceError as of `check_repeats` of `model` with `loss_fn`."""
    check_repeats(model if loss_fn is None else _WithLoss(model, loss_fn, len(args)), args, kwargs)


def traced_for_sizes(
    model: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: DynamicDims
) -> SizedTrace:
    """The graphs that `traced` gives for all sizes of the `dynamic` dims that the model allows."""
    if loss_fn is None:
        return SizedTrace.of(model, args, kwargs, dynamic, normalise)
    whole = _WithLoss(model, loss_fn, len(args))
    return SizedTrace.of(whole, args, kwargs, dynamic, lambda graph: _finished(graph, whole))


def traced_for_numbers(
    model: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: dict[str, Any], free: Collection[int]
) -> Graph:
    """The graph that `traced` gives, for all values of the `free` numbers. Errors as `graph_with_numbers`."""
    if loss_fn is None:
        return normalise(graph_with_numbers(model, args, kwargs, free))
    whole = _WithLoss(model, loss_fn, len(args))
    return _finished(graph_with_numbers(whole, args, kwargs, free), whole)


def _finished(graph: Graph, whole: "_WithLoss") -> Graph:
    graph = _constant_state(graph, whole)
    _check_loss(graph)
    return normalise(graph)


class _WithLoss(nn.Module):
    """A module with the model's parameters, buffers and submodules under
    their names, and the loss module beside them.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, num_args: int) -> None:
        super().__init__()
        self.train(model.training)
        self._parameters, self._buffers = model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._modules = dict(model._modules)
        self.loss_name = "loss_fn"
        while hasattr(model, self.loss_name):
            self.loss_name += "_"
        if isinstance(loss_fn, nn.Module):
            self._modules[self.loss_name] = loss_fn
        setattr(self, BESIDE, (("", model), *_state_of(loss_fn, self.loss_name)))

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            # Not model(...): export refuses a call of a module that is not a submodule of the traced one. Hooks run
            # nevertheless.
            return loss_fn(model._call_impl(*args[:-1], **kwargs), args[-1])

        if type(model).__call__ is not nn.Module.__call__:
            raise TraceError(
                f"{type(model).__name__} has a __call__ of its own, which loss_fn= would leave out: expected what it"
                " does in forward, or the loss in the model"
            )
        vars(forward)["__signature__"] = _signature(model, num_args)
        self.forward = forward


def _state_of(loss_fn: LossFunction, name: str) -> list[tuple[str, Any]]:
    """(name, object) of what holds the attributes of a loss function that is an object, a method of one or a partial
    of either; a loss module is a submodule, and none of it.
    """
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, nn.Module):
        return []
    owner = getattr(loss_fn, "__self__", loss_fn)
    if isinstance(owner, nn.Module):
        return [(f"{name}.{fqn}".removesuffix("."), module) for fqn, module in owner.named_modules()]
    is_object = type(getattr(owner, "__dict__", None)) is dict and not isinstance(owner, type | ModuleType)
    return [(name, owner)] if is_object and not inspect.isroutine(owner) else []


def _signature(model: nn.Module, num_args: int) -> inspect.Signature:
    """The signature of the model's forward with the target behind the positional arguments; it names the inputs."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    inputs, others = parameters[: num_args - 1], parameters[num_args - 1 :]
    is_plain = len(inputs) == num_args - 1 and all(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in inputs
    )
    if not is_plain or any(p.kind == p.VAR_POSITIONAL or p.name == "target" for p in parameters):
        return inspect.signature(lambda *args, **kwargs: None)
    positional = [p.replace(kind=p.POSITIONAL_ONLY, default=p.empty) for p in inputs]
    target = inspect.Parameter("target", inspect.Parameter.POSITIONAL_ONLY)
    named = [p if p.kind == p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY) for p in others]
    return inspect.Signature([*positional, target, *named])


def _check_loss_function(loss_fn: LossFunction) -> None:
    if not callable(loss_fn):
        raise AutoparError(f"loss_fn= expects a function of (model output, target), found {type(loss_fn).__name__}")
    trained = (
        [name for name, p in loss_fn.named_parameters() if p.requires_grad] if isinstance(loss_fn, nn.Module) else []
    )
    if trained:
        raise AutoparError(
            f"loss_fn has parameters to train ({', '.join(trained)}): make it part of the model, which returns the loss"
        )


def _constant_state(graph: Graph, whole: _WithLoss) -> Graph:
    """`graph` with the buffers and frozen parameters of the loss module, which the model lacks, as constants."""
    prefix = f"{whole.loss_name}."
    of_loss = {
        item.fqn for item in graph.inputs if item.kind in ("parameter", "buffer") and item.fqn.startswith(prefix)
    }
    written = sorted(fqn for fqn, _ in graph.mutations if fqn in of_loss)
    if written:
        raise AutoparError(
            f"loss_fn writes to its buffers ({', '.join(written)}): make it part of the model, which returns the loss"
        )
    inputs = tuple(Input("constant", item.value, item.fqn) if item.fqn in of_loss else item for item in graph.inputs)
    state = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers(remove_duplicate=False))
    tensors = {item.value.name: state[item.fqn].detach() for item in inputs if item.fqn in of_loss}
    return replace(graph, inputs=inputs, constants={**graph.constants, **tensors})


def _check_loss(graph: Graph) -> None:
    outputs = [f"{value}" if isinstance(value, Value) else repr(value) for value in graph.outputs]
    loss, *others = graph.outputs or (None,)
    is_loss = isinstance(loss, Value) and loss.shape == () and loss.dtype.is_floating_point and loss.needs_grad
    if others or not is_loss:
        raise AutoparError(
            f"loss_fn= must give one floating scalar that depends on the model's parameters, found {', '.join(outputs)}"
        )
