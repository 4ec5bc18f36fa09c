"""`unknown_ops`: what is done about ops of a graph that no rule says how to split."""

from dataclasses import replace
from typing import Literal, get_args

from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.sbp.rules import rule_of

UnknownOps = Literal["discover", "whole"]


def with_unknown_ops(graph: Graph, unknown_ops: UnknownOps) -> Graph:
    """`graph`, in which no rule is discovered for any op if `unknown_ops` is "whole"."""
    if unknown_ops == "discover":
        return graph
    ops = (replace(op, is_kept_whole=True) if rule_of(op) is None else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def check_unknown_ops(unknown_ops: object) -> None:
    """AutoparError unless it is one of `UnknownOps`."""
    if unknown_ops not in get_args(UnknownOps):
        raise AutoparError(f'unknown_ops= expects "discover" or "whole", found {unknown_ops!r}')
