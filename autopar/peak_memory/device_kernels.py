"""Tensors without data that are saved and freed as on a given type of device, which need not be present.

Ops choose kernels by device, and the kernels save different tensors for backward: on a GPU attention is fused and
dropout saves one byte an element; on a CPU attention with dropout or a float mask saves its scores.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
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
from autopar.torch_compat import FakeTensor, FakeTensorMode, fake_tensor


@contextmanager
def without_data(device_type: str) -> Iterator[RunOp]:
    """A context in which factories make tensors without data: fake ones for CPUs, on the meta device for GPUs.

    Its value runs an op. A search for anomalies, which would read gradients, is off.
    """
    fake = FakeTensorMode() if device_type == "cpu" else None
    with torch.autograd.set_detect_anomaly(False), fake or torch.device("meta"):
        yield KnownShapes(fake).run


# (shape and strides, dtype, offset) of a result.
Recipe = tuple[tuple[torch.Size, tuple[int, ...]], torch.dtype, int]


class KnownShapes:
    """A cache of shapes on the device: a call with arguments of known shapes gives tensors of the known shapes.

    `fake`: the mode of fake tensors; None: on the meta device, where views are quick to make.
    """

    def __init__(self, fake: FakeTensorMode | None) -> None:
        self.fake = fake
        self.results: dict[Hashable, tuple[Recipe | None, ...]] = {}

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of `func`, or new tensors like it."""
        if func is _EQUAL:  # within a kernel: istft raises an error if its window is all but zero
            return False
        kind = _kind(func)
        if kind == "other" or (kind != "new" and self.fake is None):
            return func(*args, **kwargs)
        base = None if kind == "new" else args[0]
        if base is not None and (type(base) is not FakeTensor or base.is_complex()):
            return func(*args, **kwargs)
        at = 0 if base is None else base.storage_offset()
        key = (func, at, _key(args), _key(tuple(kwargs.items())) if kwargs else ())
        recipe = self.results.get(key)
        if recipe is None:
            before = () if base is None else (_recipe(base),)
            out = func(*args, **kwargs)
            made = tuple(map(_recipe, out if isinstance(out, tuple) else (out,)))
            if kind != "in place" or made == before:
                self.results[key] = made
            return out
        if kind == "in place":
            return base
        made = tuple(one and self._made(one, base) for one in recipe)
        return made if len(func._schema.returns) > 1 else made[0]

    def _made(self, recipe: Recipe, base: torch.Tensor | None) -> torch.Tensor:
        if self.fake is None:
            return _EMPTY(*recipe[0], dtype=recipe[1], device=_META)
        return fake_tensor(self.fake, *recipe[:2], base, recipe[2])


_EMPTY, _META = torch.ops.aten.empty_strided.default, torch.device("meta")
_EQUAL = torch.ops.aten.equal.default


@lru_cache(maxsize=2**16)
def _kind(func: Any) -> str:
    """The kind of an op: "new", all results are new tensors; "view", the result is a view of the first argument; "in
    place", it is the first argument; "other".
    """
    returns, arguments = func._schema.returns, func._schema.arguments
    if not returns or not all(str(one.type) == "Tensor" for one in returns) or torch.Tag.inplace_view in func.tags:
        return "other"
    if all(one.alias_info is None for one in returns):
        return "other" if func._schema.is_mutable else "new"
    written = [one for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    if len(returns) > 1 or not arguments or arguments[0].alias_info is None:
        return "other"
    if not written:
        return "view" if func.is_view else "other"
    return "in place" if written == [arguments[0]] and returns[0].alias_info.is_write else "other"


def _key(arg: Any) -> Hashable:
    """A key of an argument, equal for arguments that give results of equal shapes."""
    if type(arg) is torch.Tensor or isinstance(arg, torch.Tensor):
        return arg.shape, arg.stride(), arg.dtype
    if isinstance(arg, (tuple, list)):
        return tuple(map(_key, arg))
    return type(arg), arg


def _recipe(out: torch.Tensor | None) -> Recipe | None:
    """The recipe of a tensor like a result; None for a gradient that is not needed."""
    return None if out is None else ((out.shape, out.stride()), out.dtype, int(out.storage_offset()))


def namespace_on(device_type: str) -> dict[str, Any]:
    """The names that generated code may use, with the kernels of the device."""
    names = namespace()
    if device_type == "cpu":
        return names | {"aten": _Aten(index_put=SimpleNamespace(default=index_put))}
    local = SimpleNamespace(
        **vars(names["local"]) | {"scaled_dot_product_attention": _fused(names["local"].scaled_dot_product_attention)}
    )
    kernels = {"scaled_dot_product_attention": attention, "dropout": dropout, "index_put": index_put}
    aten = _Aten(**{name: SimpleNamespace(default=run) for name, run in kernels.items()})
    return names | {"aten": aten, "local": local}


class _Aten(SimpleNamespace):
    """`torch.ops.aten` with ops that are given, such as attention and dropout as on a GPU."""

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


def index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """aten.index_put; of masks, which without data have no number of rows, with gradients of the shapes that it has."""
    masks = [one for one in indices if one is not None and one.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return torch.ops.aten.index_put.default(x, indices, values, accumulate)
    return _MaskedPut.apply(x, values, *masks)


class _MaskedPut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values, *masks):
        ctx.save_for_backward(*masks)
        ctx.shape = values.shape
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        into = gradient.clone() if ctx.needs_input_grad[0] else None
        put = gradient.new_empty(ctx.shape) if ctx.needs_input_grad[1] else None
        return into, put, *(None for _ in ctx.saved_tensors)
