"""The inverse of an order of which each rank has its own."""

from collections.abc import Sequence

import torch

from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import no_collectives
from autopar.sbp.local_ops.local_op import LocalOp


def index_put(
    blank: torch.Tensor, order: tuple[torch.Tensor], numbers: torch.Tensor, *, inverse: Sequence[Axis]
) -> torch.Tensor:
    """aten.index_put of 0, 1, 2, ... at the positions in `order`; of the `numbers` as many as it has."""
    return blank.index_put(order, numbers[: blank.shape[0]])


LOCAL_OPS = {"aten.index_put.default": LocalOp(index_put, no_collectives)}
