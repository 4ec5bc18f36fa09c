"""The local implementations of signatures with a role, by op."""

from collections.abc import Mapping

from autopar.sbp.local_ops import attention, conv, cross_entropy, embedding, grouped, loss, norm, reduce, softmax
from autopar.sbp.local_ops.local_op import LocalOp

LOCAL_OPS: Mapping[str, LocalOp] = {
    **attention.LOCAL_OPS,
    **conv.LOCAL_OPS,
    **cross_entropy.LOCAL_OPS,
    **embedding.LOCAL_OPS,
    **grouped.LOCAL_OPS,
    **loss.LOCAL_OPS,
    **norm.LOCAL_OPS,
    **reduce.LOCAL_OPS,
    **softmax.LOCAL_OPS,
}
