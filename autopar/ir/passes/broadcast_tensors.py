"""The pass that writes `broadcast_tensors`, which losses call, as an `expand` of each tensor.

An `expand` to the shape that a tensor has already is dropped by a later pass.
"""

from dataclasses import replace

from autopar.ir.graph import Graph, Op, Slot

_TARGET = "aten.broadcast_tensors.default"


def unfold_broadcasts(graph: Graph) -> Graph:
    """`graph` with an `expand` for each output of each `broadcast_tensors`; values keep their names."""
    return replace(
        graph, ops=tuple(single for op in graph.ops for single in (_expands(op) if op.target == _TARGET else (op,)))
    )


def _expands(op: Op) -> tuple[Op, ...]:
    return tuple(
        replace(
            op,
            name=output.name,
            target="aten.expand.default",
            args=(Slot(0), output.shape),
            kwargs=(),
            inputs=(value,),
            outputs=(output,),
            is_tuple=False,
        )
        for value, output in zip(op.inputs, op.outputs)
    )
