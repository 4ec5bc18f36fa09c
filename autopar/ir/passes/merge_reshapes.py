"""The pass that merges chains of reshapes into one."""

from dataclasses import replace

from autopar.ir.graph import Graph, Op

_MERGED = "aten.reshape.default"


def merge_reshapes(graph: Graph) -> Graph:
    """`graph` in which a reshape of a reshape reads the first one's input; only the last shape matters."""
    made: dict[str, Op] = {}
    ops = []
    for op in graph.ops:
        before = made.get(op.inputs[0].name) if op.target == _MERGED else None
        if before is not None and before.is_no_grad == op.is_no_grad:
            op = replace(op, inputs=before.inputs)
        if op.target == _MERGED:
            made[op.outputs[0].name] = op
        ops.append(op)
    return replace(graph, ops=tuple(ops))
