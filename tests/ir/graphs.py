"""Graphs made by hand."""

import torch

from autopar.ir.graph import Graph, Input, Op, Slot, Value


def value(name: str, *shape: int) -> Value:
    return Value(name, shape or (4, 4), torch.float32, True)


def chain(num_layers: int, ops_per_layer: int) -> Graph:
    """Layers of pointwise ops with different constants and one residual; the first two multiply by a parameter of the
    layer.
    """
    inputs, ops = [Input("argument", value("x"), "x")], []
    current = inputs[0].value
    for layer in range(num_layers):
        skip = current
        for i in range(ops_per_layer - 1):
            name = f"v{layer}_{i}"
            args: tuple = (Slot(0), i)
            operands: tuple[Value, ...] = (current,)
            if i < 2:
                inputs.append(Input("parameter", value(f"w{layer}_{i}"), f"w{layer}.{i}"))
                args, operands = (Slot(0), Slot(1)), (current, inputs[-1].value)
            current = value(name)
            ops.append(Op(name, "aten.mul.Tensor", args, (), operands, (current,), False, "", ""))
        name = f"sum{layer}"
        ops.append(Op(name, "aten.add.Tensor", (Slot(0), Slot(1)), (), (skip, current), (value(name),), False, "", ""))
        current = value(name)
    return Graph(tuple(inputs), tuple(ops), (current,), (), (), {}, ("x",), None, None)
