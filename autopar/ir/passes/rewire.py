"""Functions that all passes use: replacing values, and recognising ops that draw random numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.graph import Graph, Op, Value, arguments_of, resolve


def rewire(graph: Graph, ops: Iterable[Op], replaced: Mapping[str, Value]) -> Graph:
    """`graph` with `ops` as its ops, and every use of a value named in `replaced` replaced by the value given there."""

    def now(leaf: Any) -> Any:
        while isinstance(leaf, Value) and leaf.name in replaced:
            leaf = replaced[leaf.name]
        return leaf

    return replace(
        graph,
        ops=tuple(replace(op, inputs=tuple(now(value) for value in op.inputs)) for op in ops),
        outputs=tuple(now(item) for item in graph.outputs),
        mutations=tuple((fqn, now(value)) for fqn, value in graph.mutations),
    )


def is_random(op: Op) -> bool:
    """Whether `op` draws random numbers with its arguments; attention does, with dropout, though torch has no tag for
    it.
    """
    arguments = arguments_of(op)
    if op.target == "aten.scaled_dot_product_attention.default":
        return arguments["dropout_p"] > 0
    # arguments of dropout and of recurrent layers
    drops = arguments.get("train", True) is not False and arguments.get("dropout", 1.0) > 0
    return drops and torch.Tag.nondeterministic_seeded in resolve(op.target).tags
