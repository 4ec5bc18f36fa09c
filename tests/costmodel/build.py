"""Ops, graphs and foldings made by hand."""

from typing import Any

import torch

from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Input, Op, Slot, Value


def make_op(target: str, *args: Any, outputs: list[torch.Tensor] | None = None, **kwargs: Any) -> Op:
    """An op on these meta tensors; it is run to learn its outputs unless they are given."""
    inputs: list[torch.Tensor] = []

    def slots(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            inputs.append(arg)
            return Slot(len(inputs) - 1)
        return tuple(map(slots, arg)) if isinstance(arg, (tuple, list)) else arg

    if outputs is None:
        name, overload = target.removeprefix("aten.").split(".")
        found = getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs)
        outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    spec = slots(args), tuple((name, slots(arg)) for name, arg in kwargs.items())
    return Op("op", target, *spec, _values("in", inputs), _values("out", outputs), False, "", "")


def _values(prefix: str, tensors: list[torch.Tensor]) -> tuple[Value, ...]:
    return tuple(Value(f"{prefix}{i}", tuple(t.shape), t.dtype, t.requires_grad) for i, t in enumerate(tensors))


def meta(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=grad and dtype.is_floating_point)


def unfolded(graph: Graph) -> Folded:
    """Nothing repeats."""
    names = [op.name for op in graph.ops] + [item.value.name for item in graph.inputs]
    return Folded({name: name for name in names}, ())


def layer_stack(num_layers: int, batch: int = 16, hidden: int = 8, needs_grad: bool = False) -> Graph:
    """x = relu(x @ w_i) + x * scale, `num_layers` times; the scale is one shared constant; the last sum is the output.
    needs_grad: x does."""
    x, scale = Value("x", (batch, hidden), torch.float32, needs_grad), Value("scale", (hidden,), torch.float32, False)
    inputs, ops = [Input("argument", x, "x"), Input("constant", scale, "scale")], []
    for i in range(num_layers):
        weight = Value(f"w{i}", (hidden, hidden), torch.float32, True)
        inputs.append(Input("parameter", weight, f"w{i}"))
        made = [Value(f"{name}{i}", (batch, hidden), torch.float32, True) for name in ("mm", "relu", "mul", "add")]
        made[2] = Value(made[2].name, (batch, hidden), torch.float32, x.needs_grad)
        for value, target, read in zip(
            made,
            ("aten.mm.default", "aten.relu.default", "aten.mul.Tensor", "aten.add.Tensor"),
            ((x, weight), (made[0],), (x, scale), (made[1], made[2])),
        ):
            ops.append(
                Op(value.name, target, tuple(map(Slot, range(len(read)))), (), read, (value,), False, f"layers.{i}", "")
            )
        x = made[3]
    return Graph(tuple(inputs), tuple(ops), (x,), (), (), {}, (), None, None)


def folded_stack(graph: Graph, first: int) -> Folded:
    """Layers from `first` on are one class, the others stand alone."""
    names = [op.name for op in graph.ops] + [item.value.name for item in graph.inputs]

    def representative(name: str) -> str:
        stem, number = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
        return f"{stem}{first}" if number and int(number) > first else name

    return Folded({name: representative(name) for name in names}, ())
