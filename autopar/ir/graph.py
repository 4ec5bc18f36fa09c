"""The IR: a flat, functional, forward graph over whole (unsharded) tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph, named once; shapes are global."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"%{self.name}: {short_dtype(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in an op's args for its `index`-th tensor input."""

    index: int


@dataclass(frozen=True, slots=True)
class Op:
    """One call. `args` and `kwargs` are nested tuples of constants with `Slot(i)` for `inputs[i]`."""

    name: str
    target: str  # "aten.linear.default": the path below torch.ops
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    is_no_grad: bool  # runs under torch.no_grad()
    module: str  # FQN of the module that called it
    line: str  # "model.py:41" of the model's source
    is_tuple: bool = False  # the call returns a tuple or list, even of one


@dataclass(frozen=True, slots=True)
class Input:
    """A placeholder: kind is "parameter", "buffer", "constant" or "argument"."""

    kind: str
    value: Value
    fqn: str  # FQN of a parameter or buffer; name of a constant; path of an argument
    aliases: tuple[str, ...] = ()  # further FQNs of a tied parameter or buffer
    is_persistent: bool = True


@dataclass(frozen=True)
class Graph:
    """Invariants: ops in topological order; each value has one producer (an op or an input); no op mutates.

    `constant_ops` depend on no input: they run once at load, on the device in use, and yield the "constant" inputs
    (`constants` holds those that were tensors in the model). `outputs` are the flat outputs: a Value or a Python
    constant. `mutations` pairs a buffer's FQN with the value to write back after the call. `argument_spec` and
    `output_spec` are pytree specs of (args, kwargs) and of the result; `arguments` gives for each flat leaf its Input
    name or the constant baked in.
    """

    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Any, ...]
    mutations: tuple[tuple[str, Value], ...]
    constant_ops: tuple[Op, ...]
    constants: Mapping[str, torch.Tensor]
    arguments: tuple[Any, ...]
    argument_spec: Any
    output_spec: Any

    def of_kind(self, kind: str) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if item.kind == kind)


def nameless(op: Op) -> Op:
    """The op without its names and where it was called, so that equal calls are looked up."""
    inputs, outputs = (tuple(replace(value, name="") for value in values) for values in (op.inputs, op.outputs))
    return replace(op, name="", module="", line="", inputs=inputs, outputs=outputs)


_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64", torch.bool: "b8"}


def short_dtype(dtype: torch.dtype) -> str:
    """f32, bf16, i64, b8 ..."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.").replace("uint", "u").replace("int", "i")


def resolve(target: str) -> Any:
    """The torch op behind `Op.target`."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def arguments_of(op: Op) -> dict[str, Any]:
    """All arguments of the call by schema name, defaults filled in; tensors stay `Slot`s."""
    schema = resolve(op.target)._schema
    bound = {arg.name: arg.default_value for arg in schema.arguments if arg.has_default_value()}
    bound.update(zip((arg.name for arg in schema.arguments), op.args))
    bound.update(op.kwargs)
    return bound
