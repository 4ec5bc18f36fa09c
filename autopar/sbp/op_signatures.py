"""The signatures of an op on one mesh axis, and the sizes that they split."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from autopar.ir.graph import Op, Value
from autopar.sbp.placement import I, P, R
from autopar.sbp.proof.discover import discovered
from autopar.sbp.proof.prove_rule import proven
from autopar.sbp.rules import RULES, may_sum_gradients, rule_of
from autopar.sbp.rules.given import per_rules
from autopar.sbp.rules.matmul import ROW_BYTES
from autopar.sbp.signature import Discovery, Signature

SplitDim = tuple[str, int]  # a tensor of the op ("input0") and its dim; or a role and -1 for its indivisible units


def signatures_of_call(op: Op) -> tuple[Signature, ...]:
    """`signatures_of(op)`, computed once for equal calls."""
    return signatures_of(op.nameless)


@per_rules
def signatures_of(op: Op) -> tuple[Signature, ...]:
    """The distinct signatures of `op` on one mesh axis: all I, all R (where gradients may be pending sums), then those
    of its rule that split no dim of size 1.

    A rule that a user gave is checked, and what has no rule is run on samples. AutoparError for a rule that is not
    true.
    """
    kinds = (I, R) if may_sum_gradients(op) else (I,)
    whole = [Signature((kind,) * len(op.inputs), (kind,) * len(op.outputs)) for kind in kinds]
    signatures = (_without_gradient(op, signature) for signature in (*whole, *_splitting(op)))
    return tuple(
        dict.fromkeys(
            signature
            for signature in signatures
            if _can_sum(op, signature) and 1 not in extents_of(op, signature).values()
        )
    )


def discovery_of(op: Op) -> Discovery | None:
    """The rule that running an op on samples gives; None for an op that has a rule, or that is to stay whole."""
    is_own = op.target.startswith("autopar")  # which are whole for a reason
    return None if op.is_kept_whole or is_own or rule_of(op) is not None else discovered(op.nameless)


def _splitting(op: Op) -> Iterable[Signature]:
    rule = rule_of(op)
    if rule is None:
        found = discovery_of(op)
        return () if found is None else found.signatures
    return rule(op) if op.target in RULES else proven(op, tuple(rule(op)))


def _without_gradient(op: Op, signature: Signature) -> Signature:
    """`signature` with I for R on values without gradient, and on all inputs if no output has a gradient."""
    assert len(signature.inputs) == len(op.inputs) and len(signature.outputs) == len(op.outputs), (
        f"{op.target}: {signature} does not fit"
    )
    flows = any(value.needs_grad for value in op.outputs)
    inputs = (p if p != R or (flows and value.needs_grad) else I for p, value in zip(signature.inputs, op.inputs))
    outputs = (p if p != R or value.needs_grad else I for p, value in zip(signature.outputs, op.outputs))
    return replace(signature, inputs=tuple(inputs), outputs=tuple(outputs))


def _can_sum(op: Op, signature: Signature) -> bool:
    """Whether all pending values of `signature` can be summed: booleans cannot."""
    placed = zip(signature.inputs + signature.outputs, op.inputs + op.outputs)
    return not any(placement == P and value.dtype == torch.bool for placement, value in placed)


def extents_of(op: Op, signature: Signature) -> dict[SplitDim, int]:
    """The size of every dim and unit that the signature splits, outputs first."""
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
