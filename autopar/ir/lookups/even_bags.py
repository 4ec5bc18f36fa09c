"""`autopar.even_bags`: embedding_bag of bags of one size, a row of ids each, which a model passes as a matrix of ids.

torch writes such a matrix as a list with offsets, of which no part is a list with offsets of its own.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of
from autopar.ir.passes.row_gather import known_tensor

EVEN_BAGS = "autopar.even_bags.default"
MODES = ("sum", "mean", "max")

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "even_bags(Tensor weight, Tensor indices, Tensor? per_sample_weights, int mode, bool scale_grad_by_freq,"
    " int padding_idx) -> Tensor"
)


def _even_bags(
    weight: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor | None,
    mode: int,
    scale_grad_by_freq: bool,
    padding_idx: int,
) -> torch.Tensor:
    """[bags, width] of the rows of `weight` that each row of `indices` names, of which those of `padding_idx` count
    nothing unless it is negative.
    """
    return F.embedding_bag(
        indices,
        weight,
        mode=MODES[mode],
        scale_grad_by_freq=scale_grad_by_freq,
        per_sample_weights=weights,
        padding_idx=padding_idx if padding_idx >= 0 else None,
    )


_LIBRARY.impl("even_bags", _even_bags, "CompositeImplicitAutograd")


def keep_even_bags(graph: Graph) -> Graph:
    """`graph` with the lookups of even bags as ops of their own."""
    made = {value.name: op for op in graph.ops for value in op.outputs}
    read = {value.name for op in graph.ops for value in op.inputs} | {
        value.name for value in (*graph.outputs, *(value for _, value in graph.mutations)) if isinstance(value, Value)
    }
    return replace(graph, ops=tuple(new for op in graph.ops for new in _kept(op, made, read)))


def _kept(op: Op, made: Mapping[str, Op], read: set[str]) -> tuple[Op, ...]:
    if not op.target.startswith("aten.embedding_bag.") or any(value.name in read for value in op.outputs[1:]):
        return (op,)
    given = arguments_of(op)
    weight, ids, offsets = (op.inputs[given[name].index] for name in ("weight", "indices", "offsets"))
    num_bags, num = offsets.shape[0], ids.shape[0]
    if given["include_last_offset"] or given["sparse"] or not num or num % num_bags:
        return (op,)
    starts = known_tensor(offsets, made)
    if starts is None or not torch.equal(starts, torch.arange(num_bags) * (num // num_bags)):
        return (op,)
    weights = given["per_sample_weights"]
    steps, tensors = [], [weight]
    for value in (ids, *([op.inputs[weights.index]] if isinstance(weights, Slot) else [])):
        bags = replace(value, name=f"{op.name}_{value.name}", shape=(num_bags, num // num_bags))
        shaped = replace(op, name=bags.name, target="aten.reshape.default", args=(Slot(0), bags.shape), is_tuple=False)
        steps.append(replace(shaped, kwargs=(), inputs=(value,), outputs=(bags,)))
        tensors.append(bags)
    padding = given.get("padding_idx")
    own = Slot(2) if len(tensors) == 3 else None
    args = (Slot(0), Slot(1), own, given["mode"], given["scale_grad_by_freq"], -1 if padding is None else padding)
    bag = replace(op, target=EVEN_BAGS, args=args, kwargs=(), is_tuple=False)
    return (*steps, replace(bag, inputs=tuple(tensors), outputs=op.outputs[:1]))
