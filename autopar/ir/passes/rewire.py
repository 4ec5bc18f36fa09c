"""Replacing values of a graph by others."""

from collections.abc import Iterable, Mapping
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
