"""The pass that rewrites `x[rows, columns]` where `rows` is 0, 1, 2, ..., all rows of x.

So is `x.flatten(0, 1)[columns + rows * n]`, of x with n columns, where columns are places in a dim of n, as topk gives
them. It becomes `x[:, columns]` if the columns are the same for all rows, and a `gather` if each row has columns of its
own (of `x[rows, i, j]` along both dims as one), a `scatter` where these are written. transformers reads a padding mask
and the last token of each sample in this way. As an index the rows could not be split, since an index counts over all
of them.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir.call_args import call, takes_device
from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of
from autopar.ir.op_facts import PERMUTATIONS, RESHAPES, is_random

# Ops of which a result has places in the dim `dim` of their input, and ops that keep the numbers of the first input.
_PLACES = (
    "aten.topk.default",
    "aten.sort.default",
    "aten.argsort.default",
    "aten.argmax.default",
    "aten.argmin.default",
)
_KEEPING = frozenset((*RESHAPES, *PERMUTATIONS, "aten.slice.Tensor", "aten.select.int", "aten.expand.default"))
_PUT = "aten.index_put.default"
# Of numbers that are not below 0, by one that is above: a quotient without the rest, and the rest.
_QUOTIENTS = ("aten.floor_divide.default", "aten.floor_divide.Scalar", "aten.div.Tensor_mode", "aten.div.Scalar_mode")
_RESTS = ("aten.remainder.Scalar", "aten.fmod.Scalar")
_INDEX, _SELECT = "aten.index.Tensor", "aten.index_select.default"


def read_own_rows(graph: Graph) -> Graph:
    """`graph` with each such index rewritten; its result keeps its name."""
    made = {value.name: op for op in graph.ops for value in op.outputs}
    names = set(made) | {op.name for op in graph.ops} | {item.value.name for item in graph.inputs}
    return replace(graph, ops=tuple(new for op in graph.ops for new in _rewritten(op, made, names)))


def _rewritten(op: Op, made: Mapping[str, Op], names: set[str]) -> tuple[Op, ...]:
    if (apart := _apart(op, made, names)) is not None:
        return apart
    if op.target not in (_INDEX, _PUT) or len(op.inputs) < 3 + (op.target == _PUT):
        return (op,)
    x, rows, *columns = op.inputs[:-1] if op.target == _PUT else op.inputs
    if op.args[1] != tuple(Slot(i + 1) for i in range(len(columns) + 1)):
        return (op,)
    ndim = max(len(value.shape) for value in (rows, *columns))
    are_rows = len(rows.shape) == ndim and rows.shape[0] == x.shape[0] > 1
    if not are_rows or any(value.dtype != torch.int64 for value in columns) or not _counts(rows, made):
        return (op,)
    shape = torch.broadcast_shapes(*(value.shape for value in (rows, *columns)))
    if torch.broadcast_shapes(*(value.shape for value in columns)) == shape:
        return _columns_each(op, names)
    if op.target == _PUT or rows.shape[1:] != (1,) * (ndim - 1):
        return (op,)
    return _same_columns(op, names) if all(len(v.shape) < ndim or v.shape[0] == 1 for v in columns) else (op,)


def _apart(op: Op, made: Mapping[str, Op], names: set[str]) -> tuple[Op, ...] | None:
    """The ops of an index of rows and columns that are counted as one; None if `op` is none."""
    if (op.target, op.args[1:]) not in ((_INDEX, ((Slot(1),),)), (_SELECT, (0, Slot(1)))):
        return None
    (flat, index), (output,) = op.inputs, op.outputs
    joined, added = made.get(flat.name), made.get(index.name)
    if added is not None and added.target in RESHAPES:
        added = made.get(added.inputs[0].name)
    if joined is None or joined.target not in RESHAPES or added is None or added.target != "aten.add.Tensor":
        return None
    x, sums = joined.inputs[0], [(one, other) for one, other in itertools.permutations(added.inputs, 2)]
    if (
        added.kwargs
        or len(added.args) > 2
        or len(x.shape) < 2
        or flat.shape != (math.prod(x.shape[:2]), *x.shape[2:])
        or x.shape[0] == 1
    ):
        return None
    for columns, starts in sums:
        if columns.shape == added.outputs[0].shape and _starts_rows(starts, x, columns, made):
            found = replace(output, name=_unique(f"{output.name}_own", names), shape=(*columns.shape, *x.shape[2:]))
            args = (Slot(0), (Slot(1), Slot(2)))
            pair = replace(op, target=_INDEX, args=args, inputs=(x, starts, columns), outputs=(found,))
            return (*_columns_each(pair, names), _reshape(op, found, output.shape, output.name))
    return None


def _starts_rows(starts: Value, x: Value, columns: Value, made: Mapping[str, Op]) -> bool:
    """Whether `starts` are the places of the rows of `x` in all its columns, one row for each of `columns`, which are
    places in a dim of no more columns.
    """
    numbers = known_tensor(starts, made)
    if numbers is None or not numbers.ndim or len(numbers) != x.shape[0] or columns.shape[0] != x.shape[0]:
        return False
    firsts = (torch.arange(x.shape[0]) * x.shape[1]).view(-1, *(1,) * (numbers.ndim - 1))
    is_start = numbers.ndim == len(columns.shape) and torch.equal(numbers.long(), firsts.expand_as(numbers))
    return is_start and _are_below(x.shape[1], columns, made)


def _are_below(size: int, columns: Value, made: Mapping[str, Op]) -> bool:
    """Whether all numbers of `columns` are at least 0 and below `size`, as places in a dim of no more are."""
    end = _end(columns, made)
    return end is not None and end <= size


def _end(numbers: Value, made: Mapping[str, Op]) -> int | None:
    """A bound that all `numbers` are below, and none below 0: places in a dim, and quotients and rests of such."""
    op = made.get(numbers.name)
    if op is None:
        return None
    if op.target in _PLACES:
        dim, shape = arguments_of(op)["dim"], op.inputs[0].shape
        is_place = bool(shape) and numbers.name == op.outputs[-1].name
        return (math.prod(shape) if dim is None else shape[dim]) if is_place else None
    if op.target in _KEEPING:  # a view as another dtype has other numbers
        return None if op.inputs[0].dtype != numbers.dtype else _end(op.inputs[0], made)
    by = arguments_of(op).get("other") if op.target in (*_QUOTIENTS, *_RESTS) else None
    if type(by) is not int or by < 1:
        return None
    end = _end(op.inputs[0], made)
    is_whole = "mode" not in op.target or arguments_of(op)["rounding_mode"] is not None
    if end is None or not is_whole:
        return None
    return min(end, by) if op.target in _RESTS else -(-end // by)


def _counts(rows: Value, made: Mapping[str, Op]) -> bool:
    """Whether `rows` is 0, 1, 2, ... for every call of the model."""
    numbers = known_tensor(rows, made)
    if numbers is None:
        return False
    return torch.equal(numbers, torch.arange(len(numbers)).view(-1, *(1,) * (numbers.ndim - 1)).expand_as(numbers))


def known_tensor(value: Value, made: Mapping[str, Op]) -> torch.Tensor | None:
    """The tensor of `value` if it follows from ops without inputs, else None."""
    op = made.get(value.name)
    if op is None or len(op.inputs) > 1 or is_random(op):
        return None
    operands = [known_tensor(operand, made) for operand in op.inputs]
    inputs = [operand for operand in operands if operand is not None]
    if len(inputs) < len(operands):
        return None
    device = {"device": "cpu"} if takes_device(op) else {}
    return call(op, inputs, **device)[[output.name for output in op.outputs].index(value.name)]


def _columns_each(op: Op, names: set[str]) -> tuple[Op, ...]:
    """A `gather` or `scatter` along dim 1, all indexed dims as one, with the index expanded over the further dims."""
    is_put, (output,) = op.target == _PUT, op.outputs
    x, columns = op.inputs[0], op.inputs[2 : -1 if is_put else None]
    steps, column = _joint_column(op, columns, names)
    rest, num = x.shape[len(columns) + 1 :], math.prod(column.shape[1:])
    flat = (x.shape[0], math.prod(x.shape[1 : len(columns) + 1]), *rest)
    if flat != x.shape:
        steps.append(_reshape(op, x, flat, _unique(f"{x.name}_flat", names)))
        x = steps[-1].outputs[0]
    steps.append(_reshape(op, column, (x.shape[0], num, *(1 for _ in rest)), _unique(f"{column.name}_each", names)))
    wide = replace(column, name=_unique(f"{column.name}_wide", names), shape=(x.shape[0], num, *rest))
    steps.append(_call(op, "aten.expand.default", (wide.shape,), steps[-1].outputs, wide))
    if is_put:
        return (*steps, *_written(op, x, wide, (*column.shape, *rest), names))
    kept = replace(output, name=_unique(f"{output.name}_kept", names), shape=wide.shape)
    steps.append(_call(op, "aten.gather.default", (1, Slot(1)), (x, wide), kept))
    return (*steps, _reshape(op, kept, output.shape, output.name))


def _joint_column(op: Op, columns: tuple[Value, ...], names: set[str]) -> tuple[list[Op], Value]:
    """The position in the indexed dims as one, each of which may be counted from its end."""
    steps: list[Op] = []
    joint: Value | None = None
    for column, size in zip(columns, op.inputs[0].shape[1:]):
        front = replace(column, name=_unique(f"{column.name}_front", names))
        steps.append(_call(op, "aten.remainder.Scalar", (size,), (column,), front))
        if joint is not None:
            shape = torch.broadcast_shapes(joint.shape, column.shape)
            ahead = replace(joint, name=_unique(f"{joint.name}_ahead", names))
            steps.append(_call(op, "aten.mul.Scalar", (size,), (joint,), ahead))
            front = replace(front, name=_unique(f"{column.name}_joint", names), shape=tuple(shape))
            steps.append(_call(op, "aten.add.Tensor", (Slot(1),), (ahead, *steps[-2].outputs), front))
        joint = front
    assert joint is not None
    return steps, joint


def _written(op: Op, x: Value, wide: Value, shape: tuple[int, ...], names: set[str]) -> tuple[Op, ...]:
    """The ops that write the values of `op`, expanded to `shape`, at the columns `wide` of `x`, in the flat shape."""
    values, (output,) = op.inputs[-1], op.outputs
    each = replace(values, name=_unique(f"{values.name}_each", names), shape=shape)
    expanded = _call(op, "aten.expand.default", (shape,), (values,), each)
    flat = _reshape(op, each, wide.shape, _unique(f"{values.name}_flat", names))
    adds = len(op.args) > 3 and op.args[3] is True
    target = "aten.scatter_add.default" if adds else "aten.scatter.src"
    shaped = output if x.shape == output.shape else replace(output, name=_unique(f"{output.name}_flat", names))
    put = replace(shaped, shape=x.shape)
    steps = (expanded, flat, _call(op, target, (1, Slot(1), Slot(2)), (x, wide, *flat.outputs), put))
    return steps if shaped is output else (*steps, _reshape(op, put, output.shape, output.name))


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
