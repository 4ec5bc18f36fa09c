"""The pass that counts the rows of each expert in the order in which they are sorted.

Counts do not depend on the order of what is counted. Where the ids of experts are sorted, `cumsum(counts of ids)`, the
bounds of the experts' rows, is that of the counts of the sorted ids. So a rank that sorts its own rows alone has their
bounds too, while other readers of the counts, as a balance of experts, have those of all rows. Counts are a `histc`, a
sum of ones written at the ids, or a sum of the rows of a mask in which each row's ids, which are distinct, are True.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.graph import Graph, Op, Value, arguments_of

_SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
_SAME_ELEMENTS = ("aten.reshape.default", "aten.to.dtype")
_IDS = (torch.int32, torch.int64)
_EXACT = 2**24  # float32 counts as far
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


def count_sorted(graph: Graph) -> Graph:
    """`graph` with each such sum so; counts that nothing else reads are dead code."""
    made = {value.name: op for op in graph.ops for value in op.outputs}
    orders = {_elements(op.inputs[0], made).name: op for op in graph.ops if _sorts_all(op)}
    if not orders:
        return graph
    names = {op.name for op in graph.ops} | set(made) | {item.value.name for item in graph.inputs}
    ops: list[Op] = []
    for op in graph.ops:
        counted = _counted(op.inputs[0], made) if op.target == "aten.cumsum.default" else None
        sort = orders.get(counted[0].name) if counted else None
        if counted is None or sort is None or graph.position[sort.name] > graph.position[op.name]:
            ops.append(op)
            continue
        builder = OpBuilder(used_names=names)
        counts = _counts_of_sorted(op, sort, counted, builder)
        ops.extend((*builder.ops, replace(op, inputs=(counts,))))
    return replace(graph, ops=tuple(ops))


def _sorts_all(op: Op) -> bool:
    return op.target in _SORTS and len(op.inputs[0].shape) == 1 and not op.inputs[0].dtype.is_floating_point


def _elements(value: Value, made: Mapping[str, Op]) -> Value:
    """The value of which this has the elements, in the same order, but for casts that keep ids."""
    while (op := made.get(value.name)) is not None and op.target in _SAME_ELEMENTS:
        source = op.inputs[0].dtype
        if value.dtype != source and (source not in _IDS or value.dtype not in (*_IDS, torch.float32, torch.float64)):
            break
        value = op.inputs[0]
    return value


def _counted(value: Value, made: Mapping[str, Op]) -> tuple[Value, int, int] | None:
    """The ids whose counts `value` has, the number of counts and the largest id that is counted."""
    op = made.get(value.name)
    while op is not None and op.target == "aten.to.dtype":
        op = made.get(op.inputs[0].name)
    if op is None:
        return None
    arguments = arguments_of(op)
    match op.target:
        case "aten.histc.default":
            bins = arguments["bins"]
            if arguments["min"] == 0 and arguments["max"] in (bins - 1, bins):
                return _elements(op.inputs[0], made), bins, arguments["max"]
        case "aten.scatter_add.default" if len(op.inputs) == 3:
            zeros, ids, ones = op.inputs
            if len(zeros.shape) == 1 and (_filled(zeros, made), _filled(ones, made)) == (0, 1):
                return _few(_elements(ids, made), zeros.shape[0])
        case "aten.sum.dim_IntList":
            return _marked(op, made)
    return None


def _few(ids: Value, num: int) -> tuple[Value, int, int] | None:
    """Ids that float32 counts exactly, as integers were."""
    return (ids, num, num - 1) if math.prod(ids.shape) <= _EXACT else None


def _marked(op: Op, made: Mapping[str, Op]) -> tuple[Value, int, int] | None:
    """The ids at which a mask is True, whose rows `op` sums; they are distinct in each row if topk gives them."""
    mask, ndim = op.inputs[0], len(op.inputs[0].shape)
    dims = {dim % ndim for dim in arguments_of(op)["dim"] or ()}
    while (scatter := made.get(mask.name)) is not None and scatter.target == "aten.to.dtype":
        mask = scatter.inputs[0]
    if scatter is None or dims != set(range(ndim - 1)) or not scatter.target.startswith("aten.scatter."):
        return None
    arguments = arguments_of(scatter)
    is_one = arguments.get("value") == 1 or (len(scatter.inputs) == 3 and _filled(scatter.inputs[2], made) == 1)
    top = made.get(_elements(scatter.inputs[1], made).name)
    if not is_one or arguments["dim"] % ndim != ndim - 1 or _filled(scatter.inputs[0], made) != 0 or top is None:
        return None
    ids = top.outputs[-1]
    is_distinct = top.target == "aten.topk.default" and arguments_of(top)["dim"] % len(ids.shape) == len(ids.shape) - 1
    is_row = scatter.inputs[1].shape[-1] == ids.shape[-1] and scatter.inputs[1].shape[:-1] == mask.shape[:-1]
    return _few(ids, mask.shape[-1]) if is_distinct and is_row else None


def _filled(value: Value, made: Mapping[str, Op]) -> int | None:
    """The number that all elements of `value` are, if it is made so."""
    op = made.get(value.name)
    if op is None:
        return None
    return _FILLED.get(op.target.split(".")[1], arguments_of(op).get("fill_value"))


def _counts_of_sorted(op: Op, sort: Op, counted: tuple[Value, int, int], builder: OpBuilder) -> Value:
    _, bins, largest = counted
    at = Origin("sorted", op.module, op.line, True)
    keys = sort.outputs[0]
    if "argsort" in sort.target:
        (keys,) = builder.emit("aten.index.Tensor", (sort.inputs[0], (sort.outputs[0],)), at=at)
    (as_float,) = builder.emit("aten.to.dtype", (keys, torch.float32), at=at)
    at = replace(at, name="counts")
    (counts,) = builder.emit("aten.histc.default", (as_float, bins, 0, largest), at=at)
    dtype = op.inputs[0].dtype
    return counts if dtype == counts.dtype else builder.emit("aten.to.dtype", (counts, dtype), at=at)[0]
