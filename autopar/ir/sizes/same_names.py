"""`named_like`: a graph with the names that another one of the same model has."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Op, Value


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
            own, name=like.name, inputs=tuple(map(value, own.inputs)), outputs=tuple(map(value, own.outputs))
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
