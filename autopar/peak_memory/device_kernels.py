"""Tensors without data that are saved and freed as on a given type of device, which need not be present.

Ops choose kernels by device, and the kernels save different tensors for backward: on a GPU attention is fused and
dropout saves one byte an element; on a CPU attention with dropout or a float mask saves its scores.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.costmodel.activations.count_storages import RunOp
from autopar.costmodel.cluster.attention_kernel import FLASH, SEPARATE, AttentionCall, attention_kernel
from autopar.runtime.load_program import namespace
from autopar.torch_compat import FakeTensorMode


@contextmanager
def without_data(device_type: str) -> Iterator[RunOp]:
    """A context in which factories make tensors without data: fake ones for CPUs, on the meta device for GPUs.

    Its value runs an op. A search for anomalies, which would read gradients, is off.
    """
    device = torch.device("cpu" if device_type == "cpu" else "meta")
    with torch.autograd.set_detect_anomaly(False), FakeTensorMode() if device_type == "cpu" else device:
        yield KnownShapes(device).run


class KnownShapes:
    """A cache of shapes on the device: a call with arguments of known shapes gives tensors of the known shapes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.results: dict[Hashable, Any] = {}

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of `func`, or new tensors like it."""
        if func is _EQUAL:
            return False  # as `istft` expects, which asks it of the sum of its windows and zero
        if not _makes_all(func):
            return func(*args, **kwargs)
        key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else ())
        recipe = self.results.get(key)
        if recipe is None:
            out = func(*args, **kwargs)
            self.results[key] = _recipe(out)
            return out
        if len(recipe) == 1 and recipe[0] is not None and len(func._schema.returns) == 1:
            return _EMPTY(*recipe[0][:2], dtype=recipe[0][2], device=self.device)
        made = tuple(one and _EMPTY(*one[:2], dtype=one[2], device=self.device) for one in recipe)
        return made if len(func._schema.returns) > 1 else made[0]


_EQUAL = torch.ops.aten.equal.default
_EMPTY = torch.ops.aten.empty_strided.default


@lru_cache(maxsize=2**16)
def _makes_all(func: Any) -> bool:
    """Whether an op neither writes to its arguments nor returns tensors that share their memory."""
    returns = func._schema.returns
    return (
        bool(returns)
        and all(str(one.type) == "Tensor" and one.alias_info is None for one in returns)
        and not func._schema.is_mutable
    )


def _key(arg: Any) -> Hashable:
    """A key of an argument, equal for arguments that give results of equal shapes."""
    if type(arg) is torch.Tensor or isinstance(arg, torch.Tensor):
        return arg.shape, arg.stride(), arg.dtype
    if isinstance(arg, (tuple, list)):
        return tuple(map(_key, arg))
    return type(arg), arg


def _recipe(out: Any) -> tuple[Any, ...]:
    """(shape, strides, dtype) of each result; None for a gradient that is not needed."""
    return tuple(
        None if x is None else (x.shape, x.stride(), x.dtype) for x in (out if isinstance(out, tuple) else (out,))
    )


def namespace_on(device_type: str) -> dict[str, Any]:
    """The names that generated code may use, with the kernels of the device."""
    names = namespace()
    if device_type == "cpu":
        return names
    local = SimpleNamespace(
        **vars(names["local"]) | {"scaled_dot_product_attention": _fused(names["local"].scaled_dot_product_attention)}
    )
    return names | {"aten": _Aten(), "local": local}


class _Aten:
    """`torch.ops.aten` with attention and dropout as on a GPU."""

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
    """aten.scaled_dot_product_attention, [batch, heads, tokens, head size], by the kernel that PyTorch picks on a GPU.

    On compute capability 8.0 or newer (`attention_kernel`) that is FlashAttention, else the memory-efficient kernel,
    else separate products, which save the scores. cuDNN's kernel saves the same tensors as FlashAttention.
    """
    aten = torch.ops.aten
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    kernel = attention_kernel(AttentionCall(*shapes, query.dtype, attn_mask is not None, is_causal))
    if kernel == FLASH:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        padded = (_padded(x) for x in (query, key, value))
        results = aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, scale=scale)[0]
        return results[..., : value.shape[-1]]
    if kernel == SEPARATE:
        return aten.scaled_dot_product_attention.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
    )[0]


def _padded(x: torch.Tensor) -> torch.Tensor:
    """`x` padded to a head size of FlashAttention's kernels, a multiple of 8."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """aten.dropout, which on a GPU keeps a mask of one byte an element."""
    return (
        torch.ops.aten.native_dropout.default(x, p, True)[0]
        if train and 0 < p < 1
        else torch.ops.aten.dropout.default(x, p, train)
    )
