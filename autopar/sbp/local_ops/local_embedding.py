"""Lookup in a table whose rows are split over ranks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from autopar.sbp.convert import Axis
from autopar.sbp.local_ops._arguments import no_collectives, rank_index
from autopar.sbp.local_ops.local_op import LocalOp


def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    rows: Sequence[Axis],
) -> torch.Tensor:
    """aten.embedding of the ids within this rank's rows, zero for all others: a term of the pending sum."""
    num_rows = weight.shape[0]
    first = rank_index(rows) * num_rows
    local = indices - first
    is_elsewhere = (local < 0) | (local >= num_rows)
    padding = padding_idx - first
    out = F.embedding(local.masked_fill(is_elsewhere, 0), weight, padding if 0 <= padding < num_rows else None)
    return out.masked_fill(is_elsewhere.unsqueeze(-1), 0)


LOCAL_OPS = {"aten.embedding.default": LocalOp(embedding, no_collectives)}
