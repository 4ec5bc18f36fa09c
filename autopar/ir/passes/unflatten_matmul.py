"""The pass that rewrites products of flattened tensors as products of the tensors themselves.

`reshape(addmm(bias, reshape(x, [-1, K]), weight), [..., M])` is `linear(x, weight.T, bias)`. In the flattened tensor
the dims in front of K are one dim, which can be split along the outermost of them only. The result is one op that reads
the weight as it is stored. With `linear` and a transposed weight as a value between, that value would have a layout of
its own, which gains nothing, and no single op would save the parameter (see `regatherable` in
costmodel/activations/autograd_footprint.py).
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autopar.ir.graph import Graph, Op, Slot, Value
from autopar.ir.passes.rewire import rewire

_RESHAPE, _LINEAR = "aten.reshape.default", "aten.linear.default"
TURNED_LINEAR = "autopar.turned_linear.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("turned_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")


def _turned_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` with the weight as (inputs, outputs)."""
    return torch.nn.functional.linear(x, weight.t(), bias)


_LIBRARY.impl("turned_linear", _turned_linear, "CompositeImplicitAutograd")


@dataclass(frozen=True, slots=True)
class _Flat:
    """A match: `op` multiplies the flattened `x` by `weight`; `result` reshapes its output to the dims of `x`."""

    op: Op
    x: Value
    weight: Value
    bias: Value | None
    result: Op


def unflatten_linears(graph: Graph) -> Graph:
    """`graph` with each `linear` of rows, of which nothing but a reshape to more dims is read, as one of these dims:
    [tokens, batch, heads, size] or [tokens, batch * heads, size] -> [tokens * batch, heads * size], as in
    nn.MultiheadAttention, is the batch in a dim of its own again.
    """
    named = {op.name: op for op in graph.ops}
    made = {value.name: op for op in graph.ops for value in op.outputs}
    external = {item.name for item in graph.outputs if isinstance(item, Value)}
    external |= {value.name for _, value in graph.mutations}
    replaced: dict[str, Value] = {}
    ops: list[Op] = []
    results: set[str] = set()
    for op in graph.ops:
        uses = graph.uses.get(op.outputs[0].name, ())
        result = named.get(uses[0].user) if len(uses) == 1 else None
        before = made.get(op.inputs[0].name) if op.target == _LINEAR else None
        lead = _lead(op, before, result)
        if before is None or result is None or not lead or op.outputs[0].name in external:
            ops += [op] if op.name not in results else []
            continue
        x, rows = before.inputs[0], op.inputs[0]
        shape = (*lead, rows.shape[-1])
        if x.shape != shape:
            name = f"{op.name}_rows"
            again = replace(before, name=name, args=(Slot(0), shape), outputs=(replace(rows, name=name, shape=shape),))
            ops.append(again)
            x = again.outputs[0]
        output = replace(op.outputs[0], shape=result.outputs[0].shape)
        ops.append(replace(op, inputs=(x, *op.inputs[1:]), outputs=(output,)))
        replaced[result.outputs[0].name] = output
        results.add(result.name)
    return rewire(graph, ops, replaced) if replaced else graph


def _lead(op: Op, before: Op | None, result: Op | None) -> tuple[int, ...]:
    """The dims that `result` has in front of those of a row, if `before` has made rows of other dims."""
    if before is None or result is None or {before.target, result.target} != {_RESHAPE} or len(op.inputs[0].shape) != 2:
        return ()
    lead = result.outputs[0].shape[:-1]
    is_lead = (
        len(lead) > 1
        and _cuts_evenly(before.inputs[0].shape, lead)
        and result.outputs[0].shape[-1] == op.outputs[0].shape[-1]
    )
    return lead if is_lead and before.is_no_grad == op.is_no_grad == result.is_no_grad else ()


def _cuts_evenly(shape: tuple[int, ...], lead: tuple[int, ...]) -> bool:
    """Whether the dims `lead` are those of `shape`, of which some are joined and one may be cut in equal parts."""
    ends = [math.prod(shape[:dim]) for dim in range(len(shape) + 1)]
    sizes = [math.prod(lead[: dim + 1]) for dim in range(len(lead))]
    return all(
        any(start and not size % start and not end % size for start, end in itertools.pairwise(ends)) for size in sizes
    )


def unflatten_products(graph: Graph) -> Graph:
    """`graph` with each such product rewritten; a later pass removes the reshapes around it, which are dead code."""
    made = {value.name: op for op in graph.ops for value in op.outputs}
    users: dict[str, list[Op]] = {}
    for op in graph.ops:
        for value in op.inputs:
            users.setdefault(value.name, []).append(op)
    external = {item.name for item in graph.outputs if isinstance(item, Value)} | {
        value.name for _, value in graph.mutations
    }
    matches = {
        op.name: flat for op in graph.ops if (flat := _match(op, made, users)) and op.outputs[0].name not in external
    }
    results = {flat.result.name for flat in matches.values()}
    replaced: dict[str, Value] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if op.name in matches:
            ops.append(_product(matches[op.name]))
            replaced[matches[op.name].result.outputs[0].name] = ops[-1].outputs[0]
        elif op.name not in results:
            ops.append(op)
    return rewire(graph, ops, replaced)


def _match(op: Op, made: Mapping[str, Op], users: Mapping[str, list[Op]]) -> _Flat | None:
    operands = _operands(op)
    if operands is None:
        return None
    flat, weight, bias = operands
    before, after = made.get(flat.name), users.get(op.outputs[0].name, [])
    if before is None or before.target != _RESHAPE or len(after) != 1 or after[0].target != _RESHAPE:
        return None
    x, result = before.inputs[0], after[0]
    if x.shape[-1:] != flat.shape[-1:] or result.outputs[0].shape != (*x.shape[:-1], weight.shape[1]):
        return None
    if len({before.is_no_grad, op.is_no_grad, result.is_no_grad}) > 1:
        return None
    return _Flat(op, x, weight, bias, result)


def _operands(op: Op) -> tuple[Value, Value, Value | None] | None:
    if op.target == "aten.mm.default" and len(op.inputs) == 2:
        return op.inputs[0], op.inputs[1], None
    if op.target == "aten.addmm.default" and len(op.args) == 3 and not op.kwargs and len(op.inputs[0].shape) == 1:
        return op.inputs[1], op.inputs[2], op.inputs[0]
    return None


def _product(flat: _Flat) -> Op:
    """The product of the unflattened tensors, which keeps the name of the flat product."""
    inputs = (flat.x, flat.weight) if flat.bias is None else (flat.x, flat.weight, flat.bias)
    output = replace(flat.result.outputs[0], name=flat.op.outputs[0].name)
    slots = tuple(Slot(i) for i in range(len(inputs)))
    return replace(flat.op, target=TURNED_LINEAR, args=slots, inputs=inputs, outputs=(output,))
