"""The pass that lets custom functions read transposed parameters as they are stored.

A permutation saves nothing for backward, so that a parameter which only it reads cannot be gathered again for backward
(`regatherable` in costmodel/activations/autograd_footprint.py); and the function, which may ask tensors how they lie in
memory, is traced with the strides that it gets.
"""

from dataclasses import replace

from autopar.ir.function_ops import application_of, target_of
from autopar.ir.graph import Graph, Op, Slot


def turn_functions(graph: Graph) -> Graph:
    """`graph` with each function that reads a permuted parameter reading the parameter; a later pass removes the
    permutations, which are dead code.
    """
    parameters = {item.value.name for item in graph.of_kind("parameter")}
    turned = {
        op.outputs[0].name: op
        for op in graph.ops
        if op.target == "aten.permute.default" and op.inputs[0].name in parameters
    }
    return replace(graph, ops=tuple(_turned(op, turned) for op in graph.ops)) if turned else graph


def _turned(op: Op, turned: dict[str, Op]) -> Op:
    application = application_of(op.target)
    read = [turned.get(value.name) for value in op.inputs]
    if application is None or not any(read) or op.args != tuple(Slot(i) for i in range(len(read))):
        return op
    if application.orders or any(one is not None and one.is_no_grad != op.is_no_grad for one in read):
        return op
    orders = tuple(None if one is None else one.args[1] for one in read)
    inputs = tuple(value if one is None else one.inputs[0] for value, one in zip(op.inputs, read))
    return replace(op, target=target_of(replace(application, orders=orders)), inputs=inputs)
