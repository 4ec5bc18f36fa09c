"""`summed_in`: a graph whose parameters have their gradients summed over ranks in a dtype of the user's choice."""

from dataclasses import replace

import torch

from autopar.ir.graph import Graph, Value
from autopar.ir.op_facts import PERMUTATIONS, RESHAPES
from autopar.ir.passes.rewire import with_values

# Ops that keep every element of a weight: a view or cast of it is gathered, and its gradient summed, as the weight is.
_CASTS = {
    "aten.to.dtype",
    "aten.to.device",
    "aten.to.dtype_layout",
    "aten.to.other",
    "aten.type_as.default",
    "aten._to_copy.default",
    "aten.contiguous.default",
}
_KEEPING = _CASTS | RESHAPES | PERMUTATIONS


def summed_in(graph: Graph, dtype: torch.dtype | None) -> Graph:
    """`graph` with the gradients of its parameters, and of their casts and views, summed over ranks in `dtype`.

    None leaves each in its own dtype. Gradients of integers and complex numbers stay as they are.
    """
    if dtype is None:
        return graph
    weights = {item.value.name for item in graph.of_kind("parameter")}
    for op in graph.ops:
        if op.target in _KEEPING and op.inputs[0].name in weights:
            weights.update(value.name for value in op.outputs)

    def marked(value: Value) -> Value:
        is_summed = value.name in weights and value.needs_grad and value.dtype.is_floating_point
        return replace(value, sum_dtype=None if value.dtype == dtype else dtype) if is_summed else value

    return with_values(graph, marked)
