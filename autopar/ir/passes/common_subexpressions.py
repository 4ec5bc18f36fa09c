"""The pass that computes common subexpressions once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.function_ops import is_function
from autopar.ir.graph import Graph, Input, Op, Value
from autopar.ir.op_facts import is_random
from autopar.ir.passes.rewire import rewire


def merge_duplicates(graph: Graph) -> Graph:
    """`graph` with equal constants and equal deterministic ops merged, but for those with a backward of their own: that
    of a sum of gradients need not be the sum of theirs.

    A merged op moves up to just behind the producers of its inputs: inside the first of the layers that read it, it
    would make that layer differ from the others.
    """
    replaced = _equal_constants(graph.of_kind("constant"), graph.constants)
    seen: dict[Any, Op] = {}
    merged: set[str] = set()
    kept = []
    texts: dict[int, str] = {}  # of arguments that are one object, as those of copies of a block mostly are
    for op in graph.ops:
        inputs = tuple(replaced.get(value.name, value) for value in op.inputs)
        now = op if inputs == op.inputs else replace(op, inputs=inputs)
        args, kwargs = (texts.get(id(x)) or texts.setdefault(id(x), repr(x)) for x in (op.args, op.kwargs))
        key = (op.target, args, kwargs, tuple([value.name for value in inputs]), op.is_no_grad)
        first = now if is_random(op) or is_function(op) else seen.setdefault(key, now)
        if first is now:
            kept.append(now)
            continue
        merged.add(first.name)
        replaced.update((value.name, same) for value, same in zip(op.outputs, first.outputs))
    return rewire(graph, _hoisted(kept, merged), replaced)


def _equal_constants(inputs: tuple[Input, ...], constants: Mapping[str, torch.Tensor]) -> dict[str, Value]:
    firsts: list[Input] = []
    replaced: dict[str, Value] = {}
    for item in inputs:
        same = next(
            (first for first in firsts if _is_equal(constants[first.value.name], constants[item.value.name])), None
        )
        if same is None:
            firsts.append(item)
        else:
            replaced[item.value.name] = same.value
    return replaced


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.is_meta or b.is_meta:
        return False
    return torch.equal(a, b)


def _hoisted(ops: list[Op], merged: set[str]) -> list[Op]:
    anchor: dict[str, int] = {}
    keys = {}
    for index, op in enumerate(ops):
        place = max((anchor.get(value.name, -1) for value in op.inputs), default=-1) if op.name in merged else index
        for value in op.outputs:
            anchor[value.name] = place
        keys[op.name] = (place, index)
    return sorted(ops, key=lambda op: keys[op.name])
