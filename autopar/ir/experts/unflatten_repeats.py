"""The pass that computes on the dims of a tensor what is computed elementwise on a flattened one.

`reshape(f(repeat(x, [n, 1]), reshape(y, [n t, 1])), [n, t, k])` is `f(expand(x, [n, t, k]), reshape(y, [n, t, 1]))`. In
transformers' Llama-4 all experts compute all tokens so: flattened, tokens are not the outermost dim, and cannot be
split.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir.graph import Graph, Op, Slot, Value, resolve

_RESHAPE, _REPEAT = "aten.reshape.default", "aten.repeat.default"
_FLAT = (_RESHAPE, _REPEAT)


def unflatten_repeats(graph: Graph) -> Graph:
    """`graph` with each such op computed so, where one operand is repeated; flattened ones that nothing reads are dead
    code.
    """
    if not any(op.target == _REPEAT for op in graph.ops):
        return graph
    made = {value.name: op for op in graph.ops for value in op.outputs}
    names = set(made) | {item.value.name for item in graph.inputs} | {op.name for op in graph.ops}
    return replace(graph, ops=tuple(new for op in graph.ops for new in _rewritten(op, made, names)))


def _rewritten(op: Op, made: Mapping[str, Op], names: set[str]) -> tuple[Op, ...]:
    inner = made.get(op.inputs[0].name) if op.target == _RESHAPE else None
    if inner is None or not _is_elementwise(inner) or not _cuts_first(inner.outputs[0].shape, op.outputs[0].shape):
        return (op,)
    flat, shape = inner.outputs[0].shape, op.outputs[0].shape
    whole = [value for value in inner.inputs if value.shape[:1] == flat[:1] and len(value.shape) == len(flat)]
    operands = [made.get(value.name) for value in whole]
    if any(each is None or each.target not in _FLAT for each in operands):
        return (op,)
    if not any(each is not None and each.target == _REPEAT for each in operands):
        return (op,)
    steps: list[Op] = []
    inputs = tuple(_unflattened(value, flat, shape, made, steps, names) for value in inner.inputs)
    return *steps, replace(inner, name=op.name, inputs=inputs, outputs=op.outputs)


def _is_elementwise(op: Op) -> bool:
    return torch.Tag.pointwise in resolve(op.target).tags and len(op.outputs) == 1 and op.target.startswith("aten.")


def _cuts_first(flat: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a reshape cuts the first dim in two."""
    return len(shape) == len(flat) + 1 and shape[2:] == flat[1:] and math.prod(shape[:2]) == flat[0]


def _unflattened(
    value: Value,
    flat: tuple[int, ...],
    shape: tuple[int, ...],
    made: Mapping[str, Op],
    steps: list[Op],
    names: set[str],
) -> Value:
    """An operand with its first dim cut in two, if it has that."""
    if len(value.shape) < len(flat) or value.shape[0] == 1:
        return value  # broadcast as before
    source, wanted = made[value.name], (*shape[:2], *value.shape[1:])
    if source.target == _REPEAT and source.args[1] == (shape[0], *(1 for _ in value.shape[1:])):
        x = source.inputs[0]
        one = _step(x, (1, *x.shape), made, steps, names, like=source)
        wide = replace(value, name=_unique(f"{value.name}_wide", names), shape=wanted)
        steps.append(
            replace(
                source,
                name=wide.name,
                target="aten.expand.default",
                args=(Slot(0), wanted),
                inputs=(one,),
                outputs=(wide,),
            )
        )
        return wide
    return _step(value, wanted, made, steps, names)


def _step(
    value: Value,
    shape: tuple[int, ...],
    made: Mapping[str, Op],
    steps: list[Op],
    names: set[str],
    like: Op | None = None,
) -> Value:
    out = replace(value, name=_unique(f"{value.name}_cut", names), shape=shape)
    steps.append(
        replace(
            like or made[value.name],
            name=out.name,
            target=_RESHAPE,
            args=(Slot(0), shape),
            kwargs=(),
            inputs=(value,),
            outputs=(out,),
            is_tuple=False,
        )
    )
    return out


def _unique(stem: str, names: set[str]) -> str:
    number, name = 0, stem
    while name in names:
        number += 1
        name = f"{stem}_{number}"
    names.add(name)
    return name
