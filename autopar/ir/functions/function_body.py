"""`body_of`: forward and backward of a custom `torch.autograd.Function` as torch's ops, on tensors without data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import getitem
from typing import Any, cast

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.errors import TraceError
from autopar.ir.call_args import call, take_slots
from autopar.ir.function_ops import MADE_OF_NUMBERS, class_of, is_function
from autopar.ir.functions.one_device import in_function, on_one_device
from autopar.ir.graph import Op, Value
from autopar.ir.op_facts import is_random, is_view
from autopar.torch_compat import FakeTensorMode, OpOverload, pytree


@dataclass(frozen=True)
class FunctionBody:
    """The ops of one call, which no autograd runs through.

    The first `num_forward` of `ops` compute `outputs` from `inputs`; the others `input_gradients`, None of an input
    that has none, from `inputs`, what forward computed, and `output_gradients`, None of an output without gradient.
    """

    inputs: tuple[Value, ...]
    output_gradients: tuple[Value | None, ...]
    ops: tuple[Op, ...]
    num_forward: int
    outputs: tuple[Value, ...]
    input_gradients: tuple[Value | None, ...]

    @property
    def forward(self) -> tuple[Op, ...]:
        return self.ops[: self.num_forward]

    @property
    def backward(self) -> tuple[Op, ...]:
        return self.ops[self.num_forward :]

    @property
    def saved(self) -> tuple[Value, ...]:
        """The values that backward reads of the inputs and of what forward computed."""
        given = {value.name for value in self.output_gradients if value is not None}
        known = {value.name: value for value in self.inputs}
        known |= {value.name: value for op in self.forward for value in op.outputs}
        read = [value.name for op in self.backward for value in op.inputs]
        read += [value.name for value in self.input_gradients if value is not None]
        return tuple(known[name] for name in dict.fromkeys(read) if name in known and name not in given)


class _Unknown(Exception):
    """The function is not known as ops."""


def body_of(op: Op) -> FunctionBody | None:
    """The ops of the custom function `op`; None if it draws random numbers, reads values, writes to tensors or keeps
    tensors of its own, so that ops on tensors without data do not say what it does.
    """
    try:
        return _body(op.nameless) if is_function(op) else None
    except TraceError as error:
        raise TraceError(f"{op.line}: {error}") from None


def body_on(op: Op, shapes: tuple[tuple[int, ...], ...]) -> FunctionBody | None:
    """`body_of` a call of the function with inputs of these shapes."""
    if not is_function(op):
        return None
    inputs = tuple(replace(value, shape=shape) for value, shape in zip(op.inputs, shapes))
    return _body(replace(op, inputs=inputs).nameless)


@lru_cache(maxsize=4096)
def _body(op: Op) -> FunctionBody | None:
    if is_random(op):
        return None
    try:
        return _read(op, _traced(op))
    except TraceError:
        raise
    except Exception:  # the user's code, which was written for tensors with data
        return None


def _traced(op: Op) -> FxGraph:
    tracked = [value.needs_grad for value in op.outputs]

    def both(*tensors: torch.Tensor) -> tuple[Any, ...]:
        inputs, gradients = tensors[: len(op.inputs)], tensors[len(op.inputs) :]
        results = call(op, inputs)
        wanted = [x for x, value in zip(inputs, op.inputs) if value.needs_grad]
        ends = [x for x, is_tracked in zip(results, tracked) if is_tracked]
        found = iter(torch.autograd.grad(ends, wanted, gradients, allow_unused=True) if ends and wanted else ())
        return *results, *(next(found, None) if value.needs_grad else None for value in op.inputs)

    function = class_of(op.target)
    with on_one_device([] if function is None else [function]), in_function(), FakeTensorMode(), torch.enable_grad():
        given = [torch.empty(v.shape, dtype=v.dtype, requires_grad=v.needs_grad) for v in op.inputs]
        given += [torch.empty_like(x.detach()) for x, value in zip(call(op, given), op.outputs) if value.needs_grad]
        return make_fx(both)(*given).graph


def _read(op: Op, graph: FxGraph) -> FunctionBody:
    graph.eliminate_dead_code()
    reader = _BodyReader()
    for node in graph.nodes:
        reader.take(node)
    names = [value.name for value in reader.given]
    results = [None if node is None else reader.values[node] for node in reader.results]
    outputs, gradients = results[: len(op.outputs)], results[len(op.outputs) :]
    inputs, incoming = reader.given[: len(op.inputs)], iter(reader.given[len(op.inputs) :])
    found = tuple(value for value in outputs if value is not None)
    if len(found) != len(op.outputs) or len(names) != len(set(names)):
        raise _Unknown
    return FunctionBody(
        tuple(inputs),
        tuple(next(incoming) if value.needs_grad else None for value in op.outputs),
        tuple(reader.ops),
        _num_forward(reader.ops, found, {value.name for value in inputs}),
        found,
        tuple(gradients),
    )


def _num_forward(ops: Sequence[Op], outputs: Sequence[Value], inputs: set[str]) -> int:
    """The number of ops up to the last one that an output needs; a trace has those of backward behind them."""
    made = {value.name: number + 1 for number, op in enumerate(ops) for value in op.outputs}
    return max((made[value.name] for value in outputs if value.name not in inputs), default=0)


class _BodyReader:
    """The ops of an fx graph, whose values are on tensors without gradient."""

    def __init__(self) -> None:
        self.given: list[Value] = []
        self.ops: list[Op] = []
        self.values: dict[Node, Value] = {}
        self.parts: dict[Node, tuple[Value, ...]] = {}  # of an op with several results
        self.shared: set[Node] = set()  # views and what they are of
        self.results: list[Node | None] = []
        self.constants: dict[Any, torch.Tensor] = {}

    def take(self, node: Node) -> None:
        if node.op == "placeholder":
            self.given.append(self._value(node, node.meta["val"]))
        elif node.op == "output":
            self.results = list(cast(Sequence[Node | None], node.args[0]))
        elif node.target is getitem:
            source, number = node.args
            self.values[node] = self.parts[source][number]  # pyrefly: ignore[bad-index]
        elif node.op == "get_attr":
            self.constants[node] = getattr(node.graph.owning_module, str(node.target))
        elif node.target in MADE_OF_NUMBERS and (number := self._number(node)) is not None:
            args, kwargs, made = ((), number.item()), (("dtype", number.dtype),), self._value(node, node.meta["val"])
            self.ops.append(Op(node.name, "aten.full.default", args, kwargs, (), (made,), False, "", ""))
        elif node.op == "call_function" and isinstance(node.target, OpOverload):
            self._take_op(node, node.target)
        else:
            raise _Unknown

    def _number(self, node: Node) -> torch.Tensor | None:
        """The tensor without dims that `torch.tensor` made of a number inside the function."""
        made = self.constants.get(node.args[0])
        return made if made is not None and not made.dim() else None

    def _take_op(self, node: Node, target: OpOverload) -> None:
        if target._schema.is_mutable:
            target = self._functional(node, target)
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise _Unknown
        args, kwargs, read = take_slots(node.args, dict(node.kwargs), lambda leaf: isinstance(leaf, Node))
        self.shared |= {node, *read} if is_view(str(target)) else set()
        result = node.meta["val"]
        outputs = tuple(self._made(node, result))
        inputs = tuple(self.values[one] for one in read)
        is_tuple = isinstance(result, (list, tuple))
        self.ops.append(Op(node.name, str(target), args, kwargs, inputs, outputs, False, "", "", is_tuple))

    def _functional(self, node: Node, target: OpOverload) -> OpOverload:
        """The op that computes what `target` writes to a tensor of the function's own, which has no views; reads of the
        tensor from here on are of the result.
        """
        schema, written = target._schema, node.args[0]
        name = schema.name.partition("::")[2].removesuffix("_")
        plain = getattr(getattr(torch.ops.aten, name, None), schema.overload_name or "default", None)
        if plain is None or not isinstance(written, Node) or written.op != "call_function" or written in self.shared:
            raise _Unknown
        if node.meta["val"].dtype != written.meta["val"].dtype:
            raise _Unknown
        written.replace_all_uses_with(node, delete_user_cb=lambda user: user > node)
        return plain

    def _made(self, node: Node, result: Any) -> Iterator[Value]:
        if isinstance(result, torch.Tensor):
            yield self._value(node, result)
            return
        leaves = pytree.tree_leaves(result)
        if not all(isinstance(x, torch.Tensor) for x in leaves):
            raise _Unknown
        self.parts[node] = tuple(
            Value(f"{node.name}_{i}", tuple(x.shape), x.dtype, False) for i, x in enumerate(leaves)
        )
        yield from self.parts[node]

    def _value(self, node: Node, x: torch.Tensor) -> Value:
        self.values[node] = Value(node.name, tuple(x.shape), x.dtype, False)
        return self.values[node]
