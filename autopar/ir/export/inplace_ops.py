"""Each in-place op as the functional op that computes what it writes."""

from typing import Any

from autopar.errors import TraceError
from autopar.ir.export.functionalise import View, functional_target, read, whole, write
from autopar.ir.export.op_builder import Emitter, Origin
from autopar.ir.export.view_ops import step_of
from autopar.ir.graph import Value
from autopar.ir.op_facts import RESHAPES

_BATCH_NORM = "aten.batch_norm.default"
_INSTANCE_NORM = "aten.instance_norm.default"


def written_argument(function: Any) -> bool:
    """Whether the op writes into an argument."""
    return any(arg.alias_info is not None and arg.alias_info.is_write for arg in function._schema.arguments)


def convert_write(
    target: str, view: View, args: tuple[Any, ...], kwargs: dict[str, Any], emitter: Emitter, at: Origin
) -> View:
    """Emit the functional form of an in-place op on `view` and write its result; the result is the view itself."""
    current = args[0]
    functional = functional_target(target)
    if functional in RESHAPES or functional in ("aten.t.default", "aten.transpose.int"):
        return _convert_metadata_write(functional, view, args, emitter, at)
    if target in ("aten.copy_.default", "aten.fill_.Tensor"):
        result = _cast(args[1], current, emitter, at)
    elif target == "aten.fill_.Scalar":
        result = emitter.emit("aten.full_like.default", (current, args[1]), at=at)[0]
    elif target == "aten.zero_.default":
        result = emitter.emit("aten.zeros_like.default", (current,), at=at)[0]
    elif functional is None:
        raise TraceError(f"{at.line}: no out-of-place form of {target} is known; write the model without it")
    else:
        result = _cast(emitter.emit(functional, args, kwargs, at=at)[0], current, emitter, at)
    if result is not current:
        write(view, result, emitter, at)
    return view


def _cast(value: Value, like: Value, emitter: Emitter, at: Origin) -> Value:
    """`value` in the dtype and shape of `like`: an in-place op keeps those of the tensor it writes."""
    if value.dtype != like.dtype:
        value = emitter.emit("aten.to.dtype", (value, like.dtype), at=at)[0]
    if value.shape != like.shape:
        value = emitter.emit("aten.expand.default", (value, like.shape), at=at)[0]
    return value


def _convert_metadata_write(target: str, view: View, args: tuple[Any, ...], emitter: Emitter, at: Origin) -> View:
    base = read(view, emitter, at)
    value = emitter.emit(target, args, at=at)[0]
    view.steps = (*view.steps, step_of(target, args, base, value))
    view.value = value
    return view


def updates_statistics(target: str, args: tuple[Any, ...]) -> bool:
    """Whether a norm in training mode writes running statistics, which its schema does not say."""
    return target in (_BATCH_NORM, _INSTANCE_NORM) and bool(args[5]) and args[3] is not None


def convert_batch_norm(target: str, operands: list[Any], args: tuple[Any, ...], emitter: Emitter, at: Origin) -> View:
    """Emit the form of batch norm that returns the new running statistics, and write them to their buffers."""
    if target == _INSTANCE_NORM:
        raise TraceError(
            f"{at.line}: instance norm that tracks running statistics is not supported; set track_running_stats=False"
        )
    outputs = emitter.emit("aten._native_batch_norm_legit_functional.default", args[:8], at=at)
    for operand, value in zip(operands[3:5], outputs[3:5]):
        write(operand, value, emitter, at)
    return whole(outputs[0])
