"""The local implementations of signatures with a role, by op."""

from collections.abc import Mapping

from autopar.sbp.local_ops import (
    cross_entropy,
    grouped_mm,
    local_conv,
    local_embedding,
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
    **grouped_mm.LOCAL_OPS,
    **local_inverse.LOCAL_OPS,
    **local_loss.LOCAL_OPS,
    **local_norm.LOCAL_OPS,
    **mean.LOCAL_OPS,
    **local_softmax.LOCAL_OPS,
}
