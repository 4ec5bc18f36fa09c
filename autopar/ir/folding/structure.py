"""`structure_of`: what a graph computes, whatever the order and the names of its ops."""

import hashlib
from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Graph, Op, Value


def structure_of(graph: Graph) -> str:
    """A digest that is equal for graphs that differ in the order and the names of their ops alone.

    Each value is described by the op that makes it and by the descriptions of what that reads. Loops of a model over a
    `set` come in another order in each process.
    """
    made: dict[str, str] = {}
    for op in graph.constant_ops:
        _describe(op, made)
    for item in graph.inputs:
        name = "" if item.kind == "constant" else item.fqn
        made.setdefault(item.value.name, _digest((item.kind, name, *_facts(item.value))))
    for op in graph.ops:
        _describe(op, made)
    outputs = [made[item.name] if isinstance(item, Value) else repr(item) for item in graph.outputs]
    written = sorted((fqn, made[value.name]) for fqn, value in graph.mutations)
    given = [item for item in graph.inputs if item.kind != "constant"]
    state = sorted(repr((item.kind, item.fqn, item.aliases, *_facts(item.value))) for item in given)
    return _digest((outputs, written, state, str(graph.argument_spec), str(graph.output_spec)))


def _describe(op: Op, made: dict[str, str]) -> None:
    inputs = [made.get(value.name, repr(value.shape)) for value in op.inputs]
    call = (op.target, repr(op.args), repr(op.kwargs), op.is_no_grad, inputs)
    for number, value in enumerate(op.outputs):
        made[value.name] = _digest((*call, number, *_facts(value)))


def _facts(value: Value) -> tuple[Any, ...]:
    return value.shape, str(value.dtype), value.needs_grad


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
