"""The pass that rewrites `x[rows, columns]` where `rows` is 0, 1, 2, ..., all rows of x.

It becomes `x[:, columns]` if the columns are the same for all rows, and a `gather` if each row has a column of its own.
transformers reads a padding mask and the last token of each sample in this way. As an index the rows could not be
split, since an index counts over all of them.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir.call_args import call, takes_device
from autopar.ir.graph import Graph, Op, Slot, Value
from autopar.ir.op_facts import is_random


def read_own_rows(graph: Graph) -> Graph:
    """`graph` with each such index rewritten; its result keeps its name."""
    made = {value.name: op for op in graph.ops for value in op.outputs}
    names = set(made) | {op.name for op in graph.ops} | {item.value.name for item in graph.inputs}
    return replace(graph, ops=tuple(new for op in graph.ops for new in _rewritten(op, made, names)))


def _rewritten(op: Op, made: Mapping[str, Op], names: set[str]) -> tuple[Op, ...]:
    if (
        op.target != "aten.index.Tensor"
        or len(op.inputs) < 3
        or op.args[1] != tuple(Slot(i) for i in range(1, len(op.inputs)))
    ):
        return (op,)
    x, rows, *columns = op.inputs
    ndim = max(len(value.shape) for value in op.inputs[1:])
    are_rows = rows.shape == (x.shape[0], *(1,) * (ndim - 1)) and x.shape[0] > 1
    if not are_rows or any(value.dtype != torch.int64 for value in columns) or not _counts(rows, made):
        return (op,)
    if all(len(value.shape) < ndim or value.shape[0] == 1 for value in columns):
        return _same_columns(op, names)
    return _column_each(op, names) if [value.shape for value in columns] == [rows.shape] and ndim == 1 else (op,)


def _counts(rows: Value, made: Mapping[str, Op]) -> bool:
    """Whether `rows` is 0, 1, 2, ... for every call of the model."""
    numbers = _constant(rows, made)
    return numbers is not None and torch.equal(numbers.flatten(), torch.arange(numbers.numel()))


def _constant(value: Value, made: Mapping[str, Op]) -> torch.Tensor | None:
    """The tensor of `value` if it follows from ops without inputs, else None."""
    op = made.get(value.name)
    if op is None or len(op.inputs) > 1 or is_random(op):
        return None
    operands = [_constant(operand, made) for operand in op.inputs]
    inputs = [operand for operand in operands if operand is not None]
    if len(inputs) < len(operands):
        return None
    device = {"device": "cpu"} if takes_device(op) else {}
    return call(op, inputs, **device)[[output.name for output in op.outputs].index(value.name)]


def _column_each(op: Op, names: set[str]) -> tuple[Op, ...]:
    """A `gather` along dim 1 with the column index expanded over the further dims; a column may count from the end."""
    (x, _, column), (output,) = op.inputs, op.outputs
    rest = x.shape[2:]
    front = replace(column, name=_unique(f"{column.name}_front", names))
    steps = [_call(op, "aten.remainder.Scalar", (x.shape[1],), (column,), front)]
    steps.append(_reshape(op, front, (x.shape[0], 1, *(1 for _ in rest)), _unique(f"{column.name}_each", names)))
    wide = replace(front, name=_unique(f"{column.name}_wide", names), shape=(x.shape[0], 1, *rest))
    steps.append(_call(op, "aten.expand.default", (wide.shape,), steps[-1].outputs, wide))
    kept = replace(output, name=_unique(f"{output.name}_kept", names), shape=wide.shape)
    gathered = replace(
        op, name=kept.name, target="aten.gather.default", args=(Slot(0), 1, Slot(1)), inputs=(x, wide), outputs=(kept,)
    )
    return (*steps, gathered, _reshape(op, kept, output.shape, output.name))


def _same_columns(op: Op, names: set[str]) -> tuple[Op, ...]:
    """`x[:, columns]`: the columns without the dim of the rows, the index, and a reshape to the original shape."""
    x, (output,) = op.inputs[0], op.outputs
    ndim = max(len(value.shape) for value in op.inputs[1:])
    steps, columns = [], []
    for value in op.inputs[2:]:
        if len(value.shape) == ndim:
            steps.append(_reshape(op, value, value.shape[1:], _unique(f"{value.name}_row", names)))
            value = steps[-1].outputs[0]
        columns.append(value)
    joint = torch.broadcast_shapes(*(value.shape for value in columns))
    shape = (x.shape[0], *joint, *x.shape[len(columns) + 1 :])
    is_whole = shape == output.shape
    gathered = replace(output, name=output.name if is_whole else _unique(f"{output.name}_rows", names), shape=shape)
    indices = (None, *(Slot(i + 1) for i in range(len(columns))))
    steps.append(replace(op, name=gathered.name, args=(Slot(0), indices), inputs=(x, *columns), outputs=(gathered,)))
    return tuple(steps) if is_whole else (*steps, _reshape(op, gathered, output.shape, output.name))


def _reshape(op: Op, value: Value, shape: tuple[int, ...], name: str) -> Op:
    return _call(op, "aten.reshape.default", (shape,), (value,), replace(value, name=name, shape=shape))


def _call(op: Op, target: str, args: tuple, inputs: tuple[Value, ...], output: Value) -> Op:
    return replace(
        op, name=output.name, target=target, args=(Slot(0), *args), kwargs=(), inputs=inputs, outputs=(output,)
    )


def _unique(stem: str, names: set[str]) -> str:
    name = next(
        name for name in itertools.chain((stem,), (f"{stem}_{i}" for i in itertools.count(1))) if name not in names
    )
    names.add(name)
    return name
