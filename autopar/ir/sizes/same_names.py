"""Graphs of one model for several sizes: the names of one for the other, and whether they differ in sizes alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Op, Value, resolve


def named_like(graph: Graph, other: Graph) -> Graph:
    """`graph` with the names of inputs, values and ops of `other`, if that has the same ops on as many tensors in the
    same order; else `graph`.

    Names tell what of a plan belongs to what. Those of a trace for a range of sizes differ from those of a trace for
    one, since torch.export leaves out what does nothing at these sizes.
    """
    if _structure(graph) != _structure(other):
        return graph
    names: dict[str, str] = {}
    for ours, theirs in zip(_values(graph), _values(other), strict=True):
        if names.setdefault(ours.name, theirs.name) != theirs.name:
            return graph
    if len(set(names.values())) < len(names):
        return graph
    return _renamed(graph, names, other)


def is_of_other_sizes(graph: Graph, other: Graph) -> bool:
    """Whether two graphs of the same names have the same ops on the same tensors, and nothing differs but numbers."""
    ops = zip((*graph.constant_ops, *graph.ops), (*other.constant_ops, *other.ops), strict=False)
    return (
        _structure(graph) == _structure(other)
        and [_kind(item.value) for item in graph.inputs] == [_kind(item.value) for item in other.inputs]
        and all(_call(a) == _call(b) for a, b in ops)
        and [_kind(x) for x in graph.outputs] == [_kind(x) for x in other.outputs]
        and [(fqn, x.name) for fqn, x in graph.mutations] == [(fqn, x.name) for fqn, x in other.mutations]
        and {name: x.dtype for name, x in graph.constants.items()}
        == {name: x.dtype for name, x in other.constants.items()}
        and graph.output_spec == other.output_spec
    )


def _call(op: Op) -> Any:
    inputs, outputs = [x.name for x in op.inputs], [_kind(x) for x in op.outputs]
    return op.target, _kind(op.args), _kind(op.kwargs), inputs, outputs, op.is_no_grad, op.is_tuple


def _kind(x: Any) -> Any:
    """The properties of an argument or a value that do not follow from sizes."""
    if isinstance(x, Value):
        return x.name, len(x.shape), x.dtype, x.needs_grad
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return type(x) if type(x) in (int, float) else x


def _as_long(op: Op, num_args: int) -> tuple[Any, ...]:
    """The positional arguments of a call, up to that number with the defaults that it leaves out."""
    if len(op.args) >= num_args:
        return op.args
    missing = resolve(op.target)._schema.arguments[len(op.args) : num_args]
    return (*op.args, *(tuple(x) if isinstance(x := each.default_value, list) else x for each in missing))


def _structure(graph: Graph) -> Any:
    kinds = [(item.kind, item.fqn if item.kind in ("parameter", "buffer") else "") for item in graph.inputs]
    ops = [[(op.target, len(op.inputs), len(op.outputs)) for op in ops] for ops in (graph.ops, graph.constant_ops)]
    return kinds, ops, len(graph.constants)


def _values(graph: Graph) -> list[Value]:
    ops = (*graph.constant_ops, *graph.ops)
    return [item.value for item in graph.inputs] + [x for op in ops for x in (*op.inputs, *op.outputs)]


def _renamed(graph: Graph, names: Mapping[str, str], other: Graph) -> Graph:
    made: dict[Value, Value] = {}

    def value(x: Value) -> Value:
        if x not in made:
            made[x] = replace(x, name=names.get(x.name, x.name))
        return made[x]

    def op(own: Op, like: Op) -> Op:
        return replace(
            own,
            name=like.name,
            args=_as_long(own, len(like.args)),
            inputs=tuple(map(value, own.inputs)),
            outputs=tuple(map(value, own.outputs)),
            module=like.module,
            line=like.line,
        )

    inputs = tuple(replace(own, value=value(own.value), fqn=like.fqn) for own, like in zip(graph.inputs, other.inputs))
    return replace(
        graph,
        inputs=inputs,
        ops=tuple(map(op, graph.ops, other.ops)),
        constant_ops=tuple(map(op, graph.constant_ops, other.constant_ops)),
        outputs=tuple(value(x) if isinstance(x, Value) else x for x in graph.outputs),
        mutations=tuple((fqn, value(x)) for fqn, x in graph.mutations),
        constants={names.get(name, name): x for name, x in graph.constants.items()},
        arguments=tuple(names.get(x, x) if isinstance(x, str) else x for x in graph.arguments),
    )
