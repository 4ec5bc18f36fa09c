"""The pass that writes `x[mask] = rows` as a `masked_scatter`, whose backward has shapes that are known.

Both take the rows in the order of the places where the mask is True; the gradient of an index_put by a mask is an index
by that mask, of a size that only its values tell.
"""

from dataclasses import replace

import torch

from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.graph import Graph, Op, Slot, arguments_of

_PUT = "aten.index_put.default"


def scatter_rows(graph: Graph) -> Graph:
    """`graph` with each write of as many rows as a mask has True as a masked_scatter; values keep their names."""
    if not any(map(_writes_rows, graph.ops)):
        return graph
    names = {op.name for op in graph.ops} | {value.name for op in graph.ops for value in op.outputs}
    builder = OpBuilder(used_names=names | {item.value.name for item in graph.inputs})
    for op in graph.ops:
        if not _writes_rows(op):
            builder.ops.append(op)
            continue
        x, mask, rows = op.inputs
        at = Origin(f"{op.name}_mask", op.module, op.line, True)
        if len(mask.shape) < len(x.shape):
            ones = (1,) * (len(x.shape) - len(mask.shape))
            mask = builder.emit("aten.reshape.default", (mask, (*mask.shape, *ones)), at=at)[0]
        args = (Slot(0), Slot(1), Slot(2))
        builder.ops.append(
            replace(op, target="aten.masked_scatter.default", args=args, kwargs=(), inputs=(x, mask, rows))
        )
    return replace(graph, ops=tuple(builder.ops))


def _writes_rows(op: Op) -> bool:
    if op.target != _PUT or len(op.inputs) != 3 or len(arguments_of(op)["indices"]) != 1:
        return False
    x, mask, rows = op.inputs
    rest = x.shape[len(mask.shape) :]
    is_one_each = rows.shape[1:] == rest and len(rows.shape) == 1 + len(rest) and rows.shape[0] != 1
    return mask.dtype == torch.bool and is_one_each and not arguments_of(op)["accumulate"]
