"""The local implementations of signatures with a role, by op."""

from collections.abc import Mapping

from autopar.ir.function_ops import class_of
from autopar.sbp.local_ops import (
    cross_entropy,
    grouped_mm,
    local_conv,
    local_embedding,
    local_function,
    local_inverse,
    local_loss,
    local_norm,
    local_softmax,
    mean,
)
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.sbp.local_ops.sequence import local_attention, local_flex_attention

LOCAL_OPS: Mapping[str, LocalOp] = {
    **local_attention.LOCAL_OPS,
    **local_flex_attention.LOCAL_OPS,
    **local_conv.LOCAL_OPS,
    **cross_entropy.LOCAL_OPS,
    **local_embedding.LOCAL_OPS,
    **local_function.LOCAL_OPS,
    **grouped_mm.LOCAL_OPS,
    **local_inverse.LOCAL_OPS,
    **local_loss.LOCAL_OPS,
    **local_norm.LOCAL_OPS,
    **mean.LOCAL_OPS,
    **local_softmax.LOCAL_OPS,
}


def local_target(target: str) -> str:
    """The name under which `LOCAL_OPS` has the local implementation of `target`: one is of all custom functions."""
    return target if class_of(target) is None else local_function.TARGET


def local_op(target: str) -> LocalOp | None:
    """The local implementation of the op `target`; None if it has none."""
    return LOCAL_OPS.get(local_target(target))
