"""The pass that writes `x[mask] = rows` as a `masked_scatter`, or of one row for all as a `where`, whose backwards have
shapes that are known.

A masked_scatter takes the rows in the order of the places where the mask is True too; the gradient of an index_put by a
mask is an index by that mask, of a size that only its values tell.
"""

from collections.abc import Collection
from dataclasses import replace

import torch

from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.graph import Graph, Op, Slot, arguments_of

_PUT = "aten.index_put.default"


def scatter_rows(graph: Graph) -> Graph:
    """`graph` with each write of as many rows as a mask has True as a masked_scatter, and of one row to all of these as
    a where; values keep their names.
    """
    if not any(map(_writes_by_mask, graph.ops)):
        return graph
    picked = _picked(graph)
    names = {op.name for op in graph.ops} | {value.name for op in graph.ops for value in op.outputs}
    builder = OpBuilder(used_names=names | {item.value.name for item in graph.inputs})
    for op in graph.ops:
        is_one = _writes_one(op, picked)
        if not is_one and not _writes_rows(op):
            builder.ops.append(op)
            continue
        x, mask, rows = op.inputs
        at = Origin(f"{op.name}_mask", op.module, op.line, True)
        if len(mask.shape) < len(x.shape):
            ones = (1,) * (len(x.shape) - len(mask.shape))
            mask = builder.emit("aten.reshape.default", (mask, (*mask.shape, *ones)), at=at)[0]
        target, inputs = (
            ("aten.where.self", (mask, rows, x)) if is_one else ("aten.masked_scatter.default", (x, mask, rows))
        )
        args = (Slot(0), Slot(1), Slot(2))
        builder.ops.append(replace(op, target=target, args=args, kwargs=(), inputs=inputs))
    return replace(graph, ops=tuple(builder.ops))


def _writes_rows(op: Op) -> bool:
    if not _writes_by_mask(op):
        return False
    x, mask, rows = op.inputs
    rest = x.shape[len(mask.shape) :]
    return rows.shape[1:] == rest and len(rows.shape) == 1 + len(rest) and rows.shape[0] != 1


def _writes_one(op: Op, picked: Collection[str]) -> bool:
    """Whether all rows that the mask picks are written alike; of `picked` rows there may be one by chance."""
    if not _writes_by_mask(op):
        return False
    x, mask, rows = op.inputs
    num_dims = len(x.shape) - len(mask.shape)
    is_one = len(rows.shape) == 1 + num_dims and rows.shape[0] == 1 and rows.name not in picked
    return len(rows.shape) <= num_dims or is_one


def _picked(graph: Graph) -> set[str]:
    """Names of the values that follow from what a mask picks."""
    picked: set[str] = set()
    for op in graph.ops:
        is_pick = op.target == "aten.index.Tensor" and any(value.dtype == torch.bool for value in op.inputs[1:])
        if is_pick or any(value.name in picked for value in op.inputs):
            picked |= {value.name for value in op.outputs}
    return picked


def _writes_by_mask(op: Op) -> bool:
    if op.target != _PUT or len(op.inputs) != 3 or len(arguments_of(op)["indices"]) != 1:
        return False
    return op.inputs[1].dtype == torch.bool and not arguments_of(op)["accumulate"]
