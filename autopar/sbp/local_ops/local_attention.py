"""Causal attention of a slice of the queries, and attention by functions of indices."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir.attention.flex_op import FLEX, attend
from autopar.sbp.convert import Axis
from autopar.sbp.local_ops._arguments import no_collectives, rank_index
from autopar.sbp.local_ops.local_op import LocalOp


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    queries: Sequence[Axis],
) -> torch.Tensor:
    """aten.scaled_dot_product_attention, causal, of this rank's queries with the keys that they attend to."""
    num_queries = query.shape[-2]
    first = rank_index(queries) * num_queries
    num_keys = min(key.shape[-2], first + num_queries)
    is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(first)
    key, value = key[..., :num_keys, :], value[..., :num_keys, :]
    return F.scaled_dot_product_attention(query, key, value, is_seen, dropout_p, scale=scale, enable_gqa=enable_gqa)


def flex_attention(
    query: torch.Tensor,
    *args: Any,
    batch: Sequence[Axis] = (),
    heads: Sequence[Axis] = (),
    queries: Sequence[Axis] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """autopar.flex_attention of a part of the samples, heads or queries, whose functions count over all of them."""
    first = [rank_index(axes) * size for axes, size in zip((batch, heads, queries), query.shape)]
    return attend(query, *args, first=(first[0], first[1], first[2]))


LOCAL_OPS = {
    FLEX: LocalOp(flex_attention, no_collectives),
    "aten.scaled_dot_product_attention.default": LocalOp(attention, no_collectives),
}
