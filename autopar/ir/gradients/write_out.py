"""The gradients that a forward takes, as ops of its graph: reverse-mode differentiation of the ops emitted so far.

Each op contributes the ops of its own backward, as torch gives them (`backward_of`); these are differentiated again
when the model is trained, as under `create_graph=True`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from autopar.errors import TraceError
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.gradients.backward_of import backward_of
from autopar.ir.graph import Op, Value

# (ops of a backward, the values of its placeholders, where) -> the values of its outputs, None for one that is none.
Emit = Callable[[GraphModule, Sequence[Value], Origin], Sequence[Value | None]]


# Ops that return an input itself where the result has its shape, so that torch.export takes one for the other.
_THEMSELVES = frozenset(
    ("broadcast_tensors", "flatten", "positive", "real", "resolve_conj", "resolve_neg")
    + tuple(f"atleast_{n}d" for n in (1, 2, 3))
)
_DETACH = "aten.detach."  # autograd follows no further


def note_tracked(value: Value, builder: OpBuilder) -> None:
    """Note that autograd follows `value` from here on, and not before."""
    builder.tracked[_itself(value, builder)[0].name] = len(builder.ops)


def start_of(value: Value, is_leaf: bool, builder: OpBuilder) -> Value:
    """The value of a tensor with respect to which a gradient is taken; TraceError for a leaf that ops have made."""
    found, maker = _itself(value, builder)
    is_made = maker is not None and bool(maker.inputs) and not maker.target.startswith(_DETACH)
    if is_leaf and is_made and found.name not in builder.tracked:
        raise TraceError(
            f"the gradient is taken with respect to a leaf of autograd that {maker.target if maker else ''} gave; make"
            " it one by x = x.detach().requires_grad_()"
        )
    return found


def _itself(value: Value, builder: OpBuilder) -> tuple[Value, Op | None]:
    """The value that ops returned as `value`, and the op that made it."""
    for op in reversed(builder.ops):
        names = [output.name for output in op.outputs]
        if value.name in names:
            given = op.inputs[names.index(value.name)] if op.target.split(".")[1] in _THEMSELVES else None
            if given is None or given.shape != value.shape:
                return value, op
            value = given
    return value, None


def gradients_of(
    pairs: Sequence[tuple[Value, Value]], starts: Sequence[Value], builder: OpBuilder, at: Origin, emit: Emit
) -> tuple[Value, ...]:
    """The gradients with respect to `starts`, all of which are used, of the sum of each output in `pairs` times its
    direction. TraceError for an op whose backward cannot be written out.
    """
    ops = tuple(builder.ops)
    followed = _followed(ops, starts, builder.tracked)
    gradients: dict[str, Value] = {}

    def add(value: Value, gradient: Value) -> None:
        if value.name in gradients:
            pair = (gradients[value.name], gradient)
            gradient = builder.emit("aten.add.Tensor", pair, at=replace(at, name="gradient"))[0]
        gradients[value.name] = gradient

    for end, direction in pairs:
        add(end, direction)
    for number in reversed(range(len(ops))):
        op = ops[number]
        wanted = _wanted(op, number, followed)
        given = tuple(value.name in gradients for value in op.outputs)
        if wanted and any(given):
            directions = [gradients[value.name] for value in op.outputs if value.name in gradients]
            made = emit(backward_of(op.nameless, given, wanted, op.line), (*op.inputs, *directions), at)
            for slot, gradient in zip(wanted, made):
                if gradient is not None:
                    add(op.inputs[slot], gradient)
    for start in starts:
        if start.name not in gradients:
            raise TraceError(f"no op leads from {start.name} to what is differentiated, but torch finds a gradient")
    return tuple(gradients[start.name] for start in starts)


def _followed(ops: Sequence[Op], starts: Sequence[Value], tracked: Mapping[str, int]) -> dict[str, int]:
    """Name of each value that autograd follows back to a start -> the number of the first op that reads it so."""
    followed = {start.name: tracked.get(start.name, 0) for start in starts}
    for number, op in enumerate(ops):
        if _wanted(op, number, followed):
            differentiable = (value for value in op.outputs if value.dtype.is_floating_point or value.dtype.is_complex)
            followed |= {value.name: followed.get(value.name, 0) for value in differentiable}
    return followed


def _wanted(op: Op, number: int, followed: Mapping[str, int]) -> tuple[int, ...]:
    """The inputs of the op with respect to which its backward is taken."""
    if op.is_no_grad or op.target.startswith(_DETACH):
        return ()
    return tuple(slot for slot, value in enumerate(op.inputs) if followed.get(value.name, number + 1) <= number)
