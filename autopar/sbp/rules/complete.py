"""The signatures of an op from those that its rule lists: with those that split nothing, without what cannot be."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from autopar.ir.graph import Op, Value
from autopar.sbp.placement import I, P, R
from autopar.sbp.rules.matmul import ROW_BYTES
from autopar.sbp.signature import Signature

SplitDim = tuple[str, int]  # a tensor of the op ("input0") and its dim; or a role and -1 for its indivisible units


def completed(op: Op, splitting: Iterable[Signature], *, may_sum: bool) -> tuple[Signature, ...]:
    """The distinct signatures of `op`: all I, all R where gradients `may_sum`, then the `splitting` ones that split no
    dim of size 1, with I for R on values without gradient.
    """
    kinds = (I, R) if may_sum else (I,)
    whole = [Signature((kind,) * len(op.inputs), (kind,) * len(op.outputs)) for kind in kinds]
    flows = any(value.needs_grad for value in op.outputs)
    signatures = (_without_gradient(op, signature, flows=flows) for signature in (*whole, *splitting))
    # only then may a split dim be of size 1: most ops have none, and this is asked of every signature of every op
    has_ones = op.target in ROW_BYTES or any(1 in value.shape for value in (*op.outputs, *op.inputs))
    return tuple(
        dict.fromkeys(
            signature
            for signature in signatures
            if _can_sum(op, signature)
            and not ((has_ones or signature.num_units == 1) and 1 in own_extents(op, signature).values())
        )
    )


def _without_gradient(op: Op, signature: Signature, *, flows: bool) -> Signature:
    """`signature` with I for R on values without gradient, and on all inputs unless a gradient `flows` to them."""
    assert len(signature.inputs) == len(op.inputs) and len(signature.outputs) == len(op.outputs), (
        f"{op.target}: {signature} does not fit"
    )
    inputs = tuple(
        p if p.kind != "R" or (flows and value.needs_grad) else I for p, value in zip(signature.inputs, op.inputs)
    )
    outputs = tuple(p if p.kind != "R" or value.needs_grad else I for p, value in zip(signature.outputs, op.outputs))
    if inputs == signature.inputs and outputs == signature.outputs:
        return signature
    return replace(signature, inputs=inputs, outputs=outputs)


def _can_sum(op: Op, signature: Signature) -> bool:
    """Whether all pending values of `signature` can be summed: booleans cannot."""
    placed = zip(signature.inputs + signature.outputs, op.inputs + op.outputs)
    return not any(value.dtype == torch.bool and placement == P for placement, value in placed)


def own_extents(op: Op, signature: Signature) -> dict[SplitDim, int]:
    """The size of every dim of the op's tensors, and unit, that the signature splits, outputs first."""
    tensors = (("output", op.outputs, signature.outputs), ("input", op.inputs, signature.inputs))
    parts: dict[SplitDim, int] = {
        (f"{side}{index}", placement.dim): _num_units(op, values[index], placement.dim)
        for side, values, placements in tensors
        for index, placement in enumerate(placements)
        if placement.is_split
    }
    return parts | {(signature.role, -1): signature.num_units} if signature.num_units else parts


def _num_units(op: Op, value: Value, dim: int) -> int:
    """The number of parts that a dim can be cut into; 0 if it is no multiple of the unit that the op's kernel needs."""
    size, unit_bytes = value.shape[dim], ROW_BYTES.get(op.target, 0)
    unit = max(1, unit_bytes // value.dtype.itemsize) if dim and dim >= len(value.shape) - 2 else 1
    return size // unit if size % unit == 0 else 0
