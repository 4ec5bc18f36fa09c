"""Checks of branches that microbatches make by themselves: what holds in each of them holds in the whole batch."""

import re

from autopar.ir.graph import Graph, Op
from autopar.ir.guards.guard_ops import GUARDED

# Whether any of the samples has something is false where it is in each part; whether all have it, true where it is.
_ANSWERS = {"aten.any.default": ("Eq({}, 0)", "Ne({}, 1)"), "aten.all.default": ("Eq({}, 1)", "Ne({}, 0)")}


def own_checks(graph: Graph) -> frozenset[str]:
    """The ops whose results only such checks read."""
    named = {op.name: op for op in graph.ops}
    found = set()
    for op in graph.ops:
        uses = graph.uses.get(op.outputs[0].name, ()) if op.target in _ANSWERS else ()
        if uses and all(use.user in named and _holds_by_parts(op, named[use.user]) for use in uses):
            found.add(op.name)
    return frozenset(found)


def _holds_by_parts(op: Op, reader: Op) -> bool:
    """Whether `reader` checks of the result of `op` only what holds in the whole batch if it does in each part."""
    if reader.target != GUARDED or reader.inputs[0].name == op.outputs[0].name:
        return False
    names = [f"v{i}" for i, value in enumerate(reader.inputs[1:]) if value.name == op.outputs[0].name]
    allowed = {answer.format(name) for name in names for answer in _ANSWERS[op.target]}
    asking = [text for text in reader.args[2] if any(re.search(rf"\b{name}\b", text) for name in names)]
    return allowed.issuperset(asking)
