"""Attention sinks of transformers beside `flex_attention`, also where a model is traced as if it were on the CPU.

A sink is a score more for each head, whose weight is dropped: the output times exp(lse - logaddexp(lse, sink)), which
one fused kernel and its sums give. transformers has it so on GPUs and refuses it on the CPU, where torch's own
`flex_attention` returns no sums; `autopar.flex_attention` returns them on every device.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from autopar.errors import TraceError


@contextmanager
def sinks_kept() -> Iterator[None]:
    """Inside, transformers' "flex_attention" takes sinks on the CPU too, with `flex_attention` as one op."""
    interfaces = sys.modules.get("transformers.modeling_utils")
    if interfaces is None:
        yield
        return
    attention = interfaces.ALL_ATTENTION_FUNCTIONS
    original = attention["flex_attention"]

    def attended(module: Any, query: torch.Tensor, *args: Any, s_aux: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if s_aux is None or query.device.type != "cpu":
            more = {} if s_aux is None else {"s_aux": s_aux}
            return original(module, query, *args, **more, **kwargs)
        return _with_sinks(query, s_aux, *args, **kwargs)

    attention.register("flex_attention", attended)
    try:
        yield
    finally:
        attention.register("flex_attention", original)


def _with_sinks(
    query: torch.Tensor,
    sinks: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers' `flex_attention_forward` on a GPU: ([batch, tokens, heads, head size], lse in value's dtype)."""
    asked = [name for name in ("softcap", "position_bias", "dropout") if others.get(name)]
    if asked or not isinstance(mask, BlockMask | None):
        told = ", ".join(asked) or "a mask that is no BlockMask"
        raise TraceError(f'attn_implementation="flex_attention" with sinks and {told} is not traced: load with "eager"')
    asked_for: Any = {"scale": scaling, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    result: Any = flex_attention(query, key, value, block_mask=mask, **asked_for)
    out, sums = result[0], result[1].lse.to(value.dtype)
    whole = torch.logaddexp(sums, sinks.view(1, -1, 1).to(sums.dtype))
    out = (out * torch.exp(sums - whole).unsqueeze(-1)).to(query.dtype)
    return out.transpose(1, 2).contiguous(), sums
