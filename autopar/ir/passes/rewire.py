"""Replacing values of a graph by others."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Op, Value


def rewire(graph: Graph, ops: Iterable[Op], replaced: Mapping[str, Value]) -> Graph:
    """`graph` with `ops` as its ops, and every use of a value named in `replaced` replaced by the value given there."""

    def now(leaf: Any) -> Any:
        while isinstance(leaf, Value) and leaf.name in replaced:
            leaf = replaced[leaf.name]
        return leaf

    return replace(
        graph,
        ops=tuple(
            replace(op, inputs=tuple(now(value) for value in op.inputs))
            if any(value.name in replaced for value in op.inputs)
            else op
            for op in ops
        ),
        outputs=tuple(now(item) for item in graph.outputs),
        mutations=tuple((fqn, now(value)) for fqn, value in graph.mutations),
    )


def with_values(graph: Graph, changed: Callable[[Value], Value]) -> Graph:
    """`graph` with each value as `changed` gives it, under its name."""

    def of_op(op: Op) -> Op:
        inputs, outputs = tuple(map(changed, op.inputs)), tuple(map(changed, op.outputs))
        return op if (inputs, outputs) == (op.inputs, op.outputs) else replace(op, inputs=inputs, outputs=outputs)

    return replace(
        graph,
        inputs=tuple(replace(item, value=changed(item.value)) for item in graph.inputs),
        ops=tuple(map(of_op, graph.ops)),
        outputs=tuple(changed(item) if isinstance(item, Value) else item for item in graph.outputs),
        mutations=tuple((fqn, changed(value)) for fqn, value in graph.mutations),
    )
