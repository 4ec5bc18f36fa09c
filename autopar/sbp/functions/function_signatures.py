"""`function_signatures`: the signatures of a custom `torch.autograd.Function`, by the ops that it runs."""

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.function_ops import is_function
from autopar.ir.functions.function_body import body_of
from autopar.ir.functions.function_passes import function_called
from autopar.ir.graph import Op
from autopar.sbp.functions.function_splits import FunctionSplit, function_splits, split_of
from autopar.sbp.localize import LOCAL_ARGUMENTS, localize
from autopar.sbp.placement import local_shape
from autopar.sbp.rules.complete import SplitDim, own_extents
from autopar.sbp.signature import FUNCTION_SPLIT, Signature, Strategy


def function_signatures(op: Op) -> tuple[Signature, ...]:
    """The splitting signatures of the custom function `op` on one mesh axis; () if none follow from its ops.

    With a role it is run as its ops: something is reduced within, or its own code would do something else on parts.
    """
    return tuple(_signatures(op.nameless)) if is_function(op) else ()


def _signatures(op: Op) -> Iterator[Signature]:
    for number, split in enumerate(function_splits(op)):
        signature = replace(split.signature, role=f"{FUNCTION_SPLIT}{number}")
        yield split.signature if _runs_on_parts(op, split, signature) else signature


def _runs_on_parts(op: Op, split: FunctionSplit, signature: Signature) -> bool:
    """Whether the function itself, called with parts, runs what the ranks have to."""
    if split.reductions:
        return False
    extents = (own_extents(op, signature) | function_extents(op, signature)).values()
    if not extents:
        return True  # terms of sums are as large
    num_parts = next((n for n in range(2, 1 + min(extents, default=1)) if all(size % n == 0 for size in extents)), 0)
    if not num_parts:
        return False
    strategy, mesh_shape = Strategy((signature,)), (num_parts,)
    inputs, outputs = (
        tuple(replace(v, shape=local_shape(v.shape, (p,), mesh_shape)) for v, p in zip(values, placed))
        for values, placed in ((op.inputs, signature.inputs), (op.outputs, signature.outputs))
    )
    own = body_of(replace(op, inputs=inputs, outputs=outputs))
    local = function_called(dict(localize(op, strategy, mesh_shape)[1])["function"]).body
    return own is not None and len(own.ops) == len(local.ops) and all(map(_is_same, own.ops, local.ops))


def _is_same(own: Op, local: Op) -> bool:
    """Whether two ops are one call; sizes that a call has as arguments show in its results."""
    if (own.target, own.inputs, own.outputs) != (local.target, local.inputs, local.outputs):
        return False
    return own.target in LOCAL_ARGUMENTS or (own.args, own.kwargs) == (local.args, local.kwargs)


def function_extents(op: Op, signature: Signature) -> dict[SplitDim, int]:
    """The size of every dim that a split of the custom function `op` splits within it."""
    body, split = body_of(op), split_of(op, signature)
    if body is None or split is None:
        return {}
    return {
        (f"{inner.name} {tensor}", dim): size
        for inner in body.ops
        for (tensor, dim), size in own_extents(inner, split.of_ops[inner.name]).items()
    }
