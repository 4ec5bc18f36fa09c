"""Lookups in a table whose rows are split over ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir.graph import resolve
from autopar.ir.lookups.even_bags import EVEN_BAGS
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import Part, first_of, no_collectives, rank_index
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.torch_compat import OpOverload


def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    rows: Sequence[Axis],
    rows_part: Part | None = None,
) -> torch.Tensor:
    """aten.embedding of the ids within this rank's rows, zero for all others: a term of the pending sum."""
    num_rows = weight.shape[0]
    first = first_of(rows, rows_part, num_rows)
    local = indices - first
    is_elsewhere = (local < 0) | (local >= num_rows)
    padding = padding_idx - first
    out = F.embedding(local.masked_fill(is_elsewhere, 0), weight, padding if 0 <= padding < num_rows else None)
    return out.masked_fill(is_elsewhere.unsqueeze(-1), 0)


def embedding_bag(op: OpOverload, *args: Any, rows: Sequence[Axis], **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """A sum of each bag's ids within this rank's rows; all others have the weight zero."""
    bound: dict[str, Any] = {
        argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()
    }
    bound |= {argument.name: value for argument, value in zip(op._schema.arguments, args)} | kwargs
    weight, indices, weights = bound["weight"], bound["indices"], bound["per_sample_weights"]
    first = rank_index(rows) * weight.shape[0]
    local = indices - first
    is_here = (local >= 0) & (local < weight.shape[0])
    padding = bound.get("padding_idx")
    if padding is not None and padding >= 0:
        is_here &= indices != padding
        bound["padding_idx"] = None
    here = is_here.to(weight.dtype) if weights is None else weights * is_here
    return op(**bound | {"indices": local.masked_fill(~is_here, 0), "per_sample_weights": here})


def even_bags(
    weight: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor | None,
    mode: int,
    scale_grad_by_freq: bool,
    padding_idx: int,
    *,
    rows: Sequence[Axis],
    rows_part: Part | None = None,
) -> torch.Tensor:
    """The same of bags of one size."""
    local = indices - first_of(rows, rows_part, weight.shape[0])
    is_here = (local >= 0) & (local < weight.shape[0]) & (indices != padding_idx)
    here = is_here.to(weight.dtype) if weights is None else weights * is_here
    return resolve(EVEN_BAGS)(weight, local.masked_fill(~is_here, 0), here, mode, scale_grad_by_freq, -1)


_BAGS = ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
LOCAL_OPS = {
    "aten.embedding.default": LocalOp(embedding, no_collectives, frozenset(("rows",))),
    EVEN_BAGS: LocalOp(even_bags, no_collectives, frozenset(("rows",))),
    **{target: LocalOp(partial(embedding_bag, resolve(target)), no_collectives) for target in _BAGS},
}
