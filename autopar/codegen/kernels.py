"""Tensors without data that are kept and freed as those of a device are, though there is no such device here.

Ops choose kernels by device, and what they keep for backward differs: on a GPU attention is fused and dropout keeps one byte an element;
on a CPU attention that drops out or has a float mask keeps its scores.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode  # its tensors say "cpu"; those on the meta device choose kernels of their own
from torch.overrides import TorchFunctionMode

from autopar.codegen.load import namespace

_HALVES = (torch.float16, torch.bfloat16)


def without_data(device_type: str) -> AbstractContextManager:
    """Scope in which factories make tensors without data; on the meta device for GPUs, where ops run some five times as fast."""
    return FakeTensorMode() if device_type == "cpu" else torch.device("meta")


def namespace_on(device_type: str) -> dict[str, Any]:
    """Names that generated code may use, with the kernels of the device."""
    names = namespace()
    if device_type == "cpu":
        return names
    local = SimpleNamespace(**vars(names["local"]) | {"scaled_dot_product_attention": _fused(names["local"].scaled_dot_product_attention)})
    return names | {"aten": _Aten(), "local": local}


class _Aten:
    """`torch.ops.aten` with some kernels of a GPU."""

    def __init__(self) -> None:
        self.scaled_dot_product_attention = SimpleNamespace(default=attention)
        self.dropout = SimpleNamespace(default=dropout)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)


def _fused(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def fused(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _Fusing():
            return function(*args, **kwargs)

    return fused


class _Fusing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (attention if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """aten.scaled_dot_product_attention as FlashAttention where that can be, else as the memory-efficient kernel, which takes masks."""
    aten = torch.ops.aten
    if query.ndim != 4:
        return aten.scaled_dot_product_attention.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and query.dtype in _HALVES:
        return aten._scaled_dot_product_flash_attention.default(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
    )[0]


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """aten.dropout, which on a GPU keeps a mask of one byte an element."""
    return torch.ops.aten.native_dropout.default(x, p, True)[0] if train and 0 < p < 1 else torch.ops.aten.dropout.default(x, p, train)
