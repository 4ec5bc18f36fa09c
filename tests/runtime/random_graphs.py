"""Small graphs drawn op by op, each op run as it is drawn, so that only calls that torch takes get in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from autopar.ir.call_args import take_slots
from autopar.ir.graph import Graph, Input, Op, Slot, Value, resolve

LARGEST = 100.0  # larger numbers would hide what the others got wrong
KINDS = ("parameter", "parameter", "parameter", "frozen", "buffer", "argument", "leaf", "constant")
SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 8, 8)


class Refused(Exception):
    """The op gives numbers too large to compare, or none."""


@dataclass(frozen=True, eq=False)
class Node:
    """A value of the graph and its content."""

    value: Value
    tensor: torch.Tensor


@dataclass
class Builder:
    """The graph so far. `values` holds the content of its inputs."""

    draw: Random
    inputs: list[Input] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    mutations: list[tuple[str, Value]] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def input(self, tensor: torch.Tensor, kind: str = "") -> Node:
        """A new input with this content; where the kind is free, one that has a gradient if the tensor has."""
        may_have_grad = tensor.requires_grad or not kind
        kind = kind or self.draw.choice(KINDS)
        if not tensor.is_floating_point():
            kind = {"parameter": "buffer", "leaf": "argument", "frozen": "constant"}.get(kind, kind)
        needs_grad = kind in ("parameter", "leaf") and may_have_grad and tensor.is_floating_point()
        name = f"{kind}{len(self.inputs)}"
        value = Value(name, tuple(tensor.shape), tensor.dtype, needs_grad)
        kind = {"frozen": "parameter", "leaf": "argument"}.get(kind, kind)
        self.inputs.append(Input(kind, value, name))
        self.values[name] = tensor.detach()
        self.nodes.append(Node(value, tensor.detach().clone().requires_grad_(needs_grad)))
        return self.nodes[-1]

    def call(self, target: str, *args: Any, **kwargs: Any) -> Node:
        """The first output of `outputs`; targets of aten go without that prefix."""
        return self.outputs(target, *args, **kwargs)[0]

    def outputs(self, target: str, *args: Any, **kwargs: Any) -> tuple[Node, ...]:
        """Add one call; its `Node`s, tensors and tuples are read as arguments. Refused if its numbers are of no use."""
        target = target if target.startswith("transformers.") else f"aten.{target}"
        slotted, named, nodes = take_slots(args, kwargs, lambda leaf: isinstance(leaf, Node))
        is_no_grad = self.chance(0.04)
        with torch.set_grad_enabled(not is_no_grad):
            result = resolve(target)(*_fill(slotted, nodes), **{key: _fill(item, nodes) for key, item in named})
        is_tuple = isinstance(result, (tuple, list))
        tensors = tuple(result) if is_tuple else (result,)
        # torch says so, but no gradient gets through
        is_view_with_grad = is_no_grad and any(x.requires_grad for x in tensors)
        if is_view_with_grad or any(_is_wild(x) for x in tensors):
            raise Refused(target)
        name = f"op{len(self.ops)}"
        found = tuple(
            Node(Value(f"{name}_{i}", tuple(x.shape), x.dtype, x.requires_grad), x) for i, x in enumerate(tensors)
        )
        inputs, outputs = (tuple(node.value for node in side) for side in (nodes, found))
        self.ops.append(Op(name, target, slotted, named, inputs, outputs, is_no_grad, "", "", is_tuple))
        self.nodes.extend(found)
        return found

    def tensor(self, *shape: int) -> Node:
        """Numbers of `shape`: one made before, one reshaped, or a new input."""
        floats = [node for node in self.nodes if node.tensor.dtype == torch.float64]
        if (equal := [node for node in floats if node.value.shape == shape]) and self.draw.random() < 0.7:
            return self.draw.choice(equal)
        count = torch.Size(shape).numel()
        if (others := [node for node in floats if node.tensor.numel() == count]) and self.draw.random() < 0.5:
            return self.call("reshape.default", self.draw.choice(others), shape)
        return self.input(torch.randn(shape, dtype=torch.float64))

    def some(self, min_rank: int = 0, max_rank: int = 4) -> Node:
        """Numbers of any shape of that rank; late ones rather than early ones."""
        floats = [node for node in self.nodes if node.tensor.dtype == torch.float64 and node.tensor.numel()]
        fitting = [node for node in floats if min_rank <= node.tensor.ndim <= max_rank]
        if fitting and self.draw.random() < 0.85:
            return fitting[max(self.draw.randrange(len(fitting)), self.draw.randrange(len(fitting)))]
        return self.tensor(*self.shape(self.draw.randint(min_rank, max_rank)))

    def optional(self, *shape: int) -> Node | None:
        """A bias or a weight, which may be left out."""
        return self.tensor(*shape) if self.draw.random() < 0.7 else None

    def constant(self, *shape: int) -> Node | None:
        """A new weight without gradient, which may be left out."""
        kind = self.draw.choice(("frozen", "buffer", "constant", "argument"))
        return self.input(torch.rand(shape, dtype=torch.float64) + 0.5, kind) if self.chance() else None

    def ints(self, *shape: int, high: int) -> Node:
        """New indices below `high`."""
        return self.input(torch.randint(high, shape), self.draw.choice(("argument", "buffer", "constant")))

    def mask(self, *shape: int) -> Node:
        """New booleans."""
        return self.input(torch.rand(shape) < 0.7, self.draw.choice(("argument", "buffer", "constant")))

    def size(self) -> int:
        return self.draw.choice(SIZES)

    def shape(self, rank: int) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(rank))

    def chance(self, probability: float = 0.5) -> bool:
        return self.draw.random() < probability

    def graph(self) -> Graph:
        """What was drawn; what nothing reads leaves it, and a few other values."""
        used = {value.name for op in self.ops for value in op.inputs} | {value.name for _, value in self.mutations}
        made = [value for op in self.ops for value in op.outputs]
        outputs = [value for value in made if value.name not in used or self.chance(0.1)]
        outputs += [item.value for item in self.inputs if self.chance(0.05)]
        constants = {item.value.name: self.values[item.value.name] for item in self.inputs if item.kind == "constant"}
        arguments = tuple(item.value.name for item in self.inputs if item.kind == "argument")
        return Graph(
            tuple(self.inputs),
            tuple(self.ops),
            tuple(outputs),
            tuple(self.mutations),
            (),
            constants,
            arguments,
            None,
            None,
        )


def _fill(tree: Any, nodes: Sequence[Node]) -> Any:
    if isinstance(tree, Slot):
        return nodes[tree.index].tensor
    return [_fill(item, nodes) for item in tree] if isinstance(tree, tuple) else tree


def _is_wild(x: torch.Tensor) -> bool:
    if x.numel() == 0 or x.numel() > 5000:
        return True
    return (x.is_floating_point() or x.is_complex()) and not float(x.detach().abs().max()) < LARGEST
