"""`plain_result`: results on the meta device of the ops that models are mostly made of, without torch's own inference.

That is Python there: a fifth of a millisecond for an addition, two for a norm, of a recording that takes twenty.
"""

from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import Any

import torch

aten = torch.ops.aten

# Elementwise in floating tensors: the result has the shape, dtype and dense strides of the input.
_ELEMENTWISE = frozenset(
    (aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default)
)
# Elementwise in two tensors; of the same shape and dtype, they need no broadcast and no promotion. One may be a number.
_BINARY = frozenset((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor))


def plain_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of `func(*args, **kwargs)` on the meta device; None of calls that only torch knows.

    Its tensors must be floating, contiguous and of one dtype, and their shapes fit: no error is to be raised here.
    """
    if (result_of := _RESULTS.get(func)) is not None:
        return result_of(*args, **kwargs)
    shape_of = _SHAPES.get(func)
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if shape_of is None or kwargs or not tensors or any(map(_is_special, tensors)):
        return None
    dtype = tensors[0].dtype
    if not dtype.is_floating_point or any(x.dtype != dtype for x in tensors):
        return None
    shape = shape_of(args, tensors)
    if shape is None:
        return None
    return _made(shape, tensors)


def _made(shape: tuple[int, ...], tensors: list[torch.Tensor]) -> torch.Tensor:
    """A result of this shape of floating `tensors`."""
    result = torch.empty(shape, dtype=tensors[0].dtype, device="meta")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return result.requires_grad_().clone()  # no leaf: that could not be written to
    return result


def _cross_entropy(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1, *_: Any
) -> torch.Tensor | None:
    """Of scores [rows, classes] and class numbers [rows], a mean (1) or sum (2)."""
    is_plain = weight is None and reduction in (1, 2) and scores.ndim == 2 and scores.dtype.is_floating_point
    fits = target.dtype == torch.int64 and target.shape == scores.shape[:1]
    return _made((), [scores]) if is_plain and fits and not _is_special(scores) else None


def _concatenated(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Of floating tensors of one dtype that differ along `dim` alone."""
    if any(map(_is_special, tensors)) or len({(x.dtype, x.ndim) for x in tensors}) > 1:
        return None
    first = tensors[0]
    if not first.dtype.is_floating_point or not -first.ndim <= dim < first.ndim:
        return None
    dim %= first.ndim
    if len({(*x.shape[:dim], *x.shape[dim + 1 :]) for x in tensors}) > 1:
        return None
    return _made((*first.shape[:dim], sum(x.shape[dim] for x in tensors), *first.shape[dim + 1 :]), tensors)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Of [..., rows, d], [..., columns, d] and [..., columns, e], of four dims in any order of memory."""
    tensors = [query, key, value]
    if enable_gqa or dropout or (is_causal and mask is not None) or any(x.ndim != 4 or not x.numel() for x in tensors):
        return None
    if not query.dtype.is_floating_point or any(x.dtype != query.dtype or not _is_tensor(x) for x in tensors):
        return None
    scores = (*query.shape[:3], key.shape[2])
    fits = query.shape[:2] == key.shape[:2] == value.shape[:2] and key.shape[2] == value.shape[2]
    if not fits or query.shape[3] != key.shape[3] or (mask is not None and not _is_mask(mask, scores)):
        return None
    return _made((*query.shape[:3], value.shape[3]), tensors)


def _is_mask(mask: torch.Tensor, scores: tuple[int, ...]) -> bool:
    """Whether `mask` is one of booleans for scores of this shape."""
    is_plain = mask.dtype == torch.bool and mask.ndim == 4
    return is_plain and all(size in (1, whole) for size, whole in zip(mask.shape, scores))


def _is_special(x: torch.Tensor) -> bool:
    """Whether a result might look otherwise: of other strides than a new tensor has."""
    return not _is_tensor(x) or not x.numel() or x.stride() != _strides(x.shape)


def _is_tensor(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a new tensor of this shape."""
    return (*accumulate(shape[:0:-1], mul, initial=1),)[::-1] if shape else ()


Shape = torch.Size | tuple[int, ...] | None


def _of_input(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Shape:
    return tensors[0].shape if len(tensors) == 1 and args[0] is tensors[0] else None


def _of_softmax(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Shape:
    is_plain = len(args) == 2 and -args[0].ndim <= args[1] < args[0].ndim
    return args[0].shape if is_plain else None


def _of_both(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Shape:
    if len(args) == 2 and args[0] is tensors[0] and type(args[1]) in (int, float):
        return args[0].shape
    return args[0].shape if len(args) == 2 == len(tensors) and args[0].shape == args[1].shape else None


def _of_power(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Shape:
    return args[0].shape if type(args[1]) in (int, float) else None


def _of_norm(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Shape:
    """layer_norm(input, normalized_shape, weight, bias, eps): the last dims are normalised."""
    normalised = tuple(args[1])
    fits = len(normalised) > 0 and tuple(args[0].shape[-len(normalised) :]) == normalised
    return args[0].shape if fits and all(tuple(x.shape) == normalised for x in tensors[1:]) else None


def _of_linear(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Shape:
    """linear(input [..., k], weight [n, k], bias [n]) is [..., n]."""
    given, weight = args[:2]
    fits = given.ndim > 1 and weight.ndim == 2 and given.shape[-1] == weight.shape[1]
    fits = fits and all(x.shape == weight.shape[:1] for x in tensors[2:])
    return (*given.shape[:-1], weight.shape[0]) if fits else None


def _of_addmm(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Shape:
    """addmm(bias [n], left [m, k], right [k, n]) is [m, n]."""
    if len(args) != 3 or [x.ndim for x in tensors] != [1, 2, 2]:
        return None
    bias, left, right = tensors
    return (
        (left.shape[0], right.shape[1]) if left.shape[1] == right.shape[0] and bias.shape == right.shape[1:] else None
    )


_SHAPES: dict[Any, Callable[[tuple[Any, ...], list[torch.Tensor]], Shape]] = {
    **dict.fromkeys(_ELEMENTWISE, _of_input),
    **dict.fromkeys(_BINARY, _of_both),
    aten.softmax.int: _of_softmax,
    aten.log_softmax.int: _of_softmax,
    aten.layer_norm.default: _of_norm,
    aten.linear.default: _of_linear,
    aten.addmm.default: _of_addmm,
    aten.pow.Tensor_Scalar: _of_power,
}
_RESULTS: dict[Any, Callable[..., torch.Tensor | None]] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.cat.default: _concatenated,
    aten.scaled_dot_product_attention.default: _attention,
}
