"""Conversion of in-place ops, and of batch norms, to the functional ops that compute the written values."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import TraceError
from autopar.ir.export.functionalise import View, functional_target, read, whole, write
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.export.view_ops import step_of
from autopar.ir.graph import Value, resolve
from autopar.ir.op_facts import RESHAPES

_BATCH_NORM = "aten.batch_norm.default"
_INSTANCE_NORM = "aten.instance_norm.default"
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_forward = nn.BatchNorm1d.forward


def written_arguments(function: Any) -> tuple[str, ...]:
    """Names of the arguments that the op writes to, as its schema says."""
    return tuple(
        arg.name for arg in function._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write
    )


def is_out_variant(function: Any) -> bool:
    """Whether the op writes all its results to tensors given by keyword, as with `out=`."""
    written = [arg for arg in function._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return bool(written) and all(arg.kwarg_only and str(arg.type) == "Tensor" for arg in written)


def convert_out(
    function: Any,
    views: Mapping[str, View],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    builder: OpBuilder,
    at: Origin,
) -> View | tuple[View, ...]:
    """Emit the overload that returns what this one writes, and write its results.

    The results are the `views`, by argument.
    """
    functional = _without_out(function)
    if functional is None:
        raise TraceError(f"{at.line}: no form of {function} without out= is known; write the model without it")
    names = written_arguments(function)
    rest = {name: value for name, value in kwargs.items() if name not in names}
    for name, result in zip(names, builder.emit(str(functional), args, rest, at=at)):
        current = read(views[name], builder, at)
        if result.shape != current.shape and (views[name].steps or math.prod(current.shape)):
            raise TraceError(
                f"{at.line}: {function} has a result of shape {list(result.shape)} for a tensor of shape"
                f" {list(current.shape)} given as {name}=; give one of the result's shape"
            )
        if result.dtype != current.dtype:
            result = builder.emit("aten.to.dtype", (result, current.dtype), at=at)[0]
        write(views[name], result, builder, at)
    return tuple(views[name] for name in names) if len(names) > 1 else views[names[0]]


def _without_out(function: Any) -> Any:
    """The overload of the same op with the same arguments but those written to; it may have others by keyword."""
    packet = function.overloadpacket
    inputs = [(arg.name, str(arg.type)) for arg in function._schema.arguments if arg.alias_info is None]
    for overload in (getattr(packet, name) for name in packet.overloads()):
        schema = overload._schema
        if schema.is_mutable or len(schema.returns) != len(written_arguments(function)):
            continue
        own = {arg.name: (arg.name, str(arg.type)) for arg in schema.arguments}
        needed = {name for name, arg in own.items() if not _is_optional_keyword(schema, name)}
        if all(item in own.values() for item in inputs) and needed <= {name for name, _ in inputs}:
            return overload
    return None


def _is_optional_keyword(schema: Any, name: str) -> bool:
    return any(arg.name == name and arg.kwarg_only and arg.has_default_value() for arg in schema.arguments)


def convert_write(
    target: str, view: View, args: tuple[Any, ...], kwargs: dict[str, Any], builder: OpBuilder, at: Origin
) -> View:
    """Emit the functional form of an in-place op on `view` and write its result; returns the view itself."""
    current = args[0]
    functional = functional_target(target)
    if functional in RESHAPES or functional in ("aten.t.default", "aten.transpose.int", "aten.detach.default"):
        return _convert_metadata_write(functional, view, args, builder, at)
    if target in ("aten.copy_.default", "aten.fill_.Tensor"):
        result = _cast(args[1], current, builder, at)
    elif target == "aten.fill_.Scalar":
        result = builder.emit("aten.full_like.default", (current, args[1]), at=at)[0]
    elif target == "aten.zero_.default":
        result = builder.emit("aten.zeros_like.default", (current,), at=at)[0]
    elif target == "aten.fill_diagonal_.default" and len(current.shape) == 2 and not any(args[2:]):
        given = {"dtype": torch.bool}
        diagonal = builder.emit("aten.eye.m", current.shape, given, at=replace(at, name="diagonal"))[0]
        result = builder.emit("aten.where.ScalarSelf", (diagonal, args[1], current), at=at)[0]
    elif functional is None or written_arguments(resolve(target)) != (_first_argument(target),):
        names = ", ".join(written_arguments(resolve(target)))
        raise TraceError(
            f"{at.line}: {target} writes to its argument {names}, and no out-of-place form of it is known; write the"
            " model without it"
        )
    else:
        result = _cast(builder.emit(functional, args, kwargs, at=at)[0], current, builder, at)
    if result is not current:
        write(view, result, builder, at)
    return view


def _first_argument(target: str) -> str:
    """The name of the first argument, if it is one tensor."""
    first = resolve(target)._schema.arguments[0]
    return first.name if str(first.type) == "Tensor" else ""


def _cast(value: Value, like: Value, builder: OpBuilder, at: Origin) -> Value:
    """`value` in the dtype and shape of `like`: an in-place op keeps those of the tensor it writes."""
    if value.dtype != like.dtype:
        value = builder.emit("aten.to.dtype", (value, like.dtype), at=at)[0]
    if value.shape != like.shape:
        value = builder.emit("aten.expand.default", (value, like.shape), at=at)[0]
    return value


def _convert_metadata_write(target: str, view: View, args: tuple[Any, ...], builder: OpBuilder, at: Origin) -> View:
    if view.storage.owner and target != "aten.detach.default":
        raise TraceError(
            f"{at.line}: the forward changes the shape of {view.storage.owner} in place; use the out-of-place operation"
            " here"
        )
    base = read(view, builder, at)
    value = builder.emit(target, args, at=at)[0]
    view.steps = (*view.steps, step_of(target, args, base, value))
    view.value = value
    return view


def updates_statistics(target: str, args: tuple[Any, ...]) -> bool:
    """Whether a call is a norm in training mode that writes running statistics, which its schema does not show."""
    return target in (_BATCH_NORM, _INSTANCE_NORM) and bool(args[5]) and args[3] is not None


def convert_batch_norm(target: str, operands: list[Any], args: tuple[Any, ...], builder: OpBuilder, at: Origin) -> View:
    """Emit the form of batch norm that returns the new running statistics, and write them to their buffers."""
    if target == _INSTANCE_NORM:
        raise TraceError(
            f"{at.line}: instance norm that tracks running statistics is not supported; set track_running_stats=False"
        )
    outputs = builder.emit("aten._native_batch_norm_legit_functional.default", args[:8], at=at)
    for operand, value in zip(operands[3:5], outputs[3:5]):
        write(operand, value, builder, at)
    return whole(outputs[0])


@contextmanager
def batch_norms_traced() -> Iterator[None]:
    """Inside, batch norms run ops that a graph can have.

    `SyncBatchNorm` sums over ranks; in a graph over whole tensors a batch norm has the whole batch. `momentum=None`
    reads the number of batches so far.
    """
    with ExitStack() as stack:
        for kind in _KINDS:
            stack.enter_context(patch.object(kind, "forward", _traced))
        yield


def _traced(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.momentum is not None or not (self.training and self.track_running_stats):
        return _forward(self, x)
    self._check_input_dim(x)
    self.num_batches_tracked.add_(1)
    mean, variance = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
    out = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)  # momentum 1: of this batch
    share = 1 / self.num_batches_tracked
    for average, own in ((self.running_mean, mean), (self.running_var, variance)):
        average.add_((own.detach() - average) * share)
    return out
