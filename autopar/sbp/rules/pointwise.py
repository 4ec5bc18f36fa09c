"""Rules of ops that compute each output element from the input elements that broadcast to it.

Proof of the splits: output element i reads input elements i only, so parts of the output need the same parts of the
inputs. Proof of pending sums: if f is linear in some arguments together, f(sum a_r, sum b_r; c) = sum f(a_r, b_r; c);
the gradients of a and b need only the whole gradient of the output and c, and the gradient of c is a sum over the
ranks' a_r: c is R.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from autopar.ir.graph import Op, Slot, arguments_of
from autopar.sbp.placement import P, R, S
from autopar.sbp.rules._dims import broadcast_splits, keeps_sums, other_dims, overloads
from autopar.sbp.signature import Signature

Rule = Callable[[Op], Iterable[Signature]]

_NONLINEAR = """
    abs absolute exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos atan sinh cosh
    tanh asinh acosh atanh sinc sigmoid log_sigmoid logit erf erfc erfinv lgamma digamma i0 sign sgn signbit floor
    ceil round trunc fix frac angle relu relu6 gelu silu mish elu selu celu softplus softshrink hardshrink hardtanh
    hardswish hardsigmoid leaky_relu threshold clamp clamp_min clamp_max clip nan_to_num pow float_power maximum
    minimum fmax fmin fmod remainder floor_divide atan2 arctan2 hypot copysign xlogy logaddexp logaddexp2 heaviside
    nextafter
    eq ne lt le gt ge not_equal less less_equal greater greater_equal isnan isinf isfinite isposinf isneginf isclose
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    special_entr special_expit special_ndtr special_log_ndtr special_erfcx special_i0e special_i1 special_i1e
    special_xlog1py polygamma polar
    bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__
"""

# op -> the sets of arguments in which it is jointly linear; a scalar in such a set must be 0
_LINEAR: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "neg": (("self",),),
    "negative": (("self",),),
    "positive": (("self",),),
    "real": (("self",),),
    "imag": (("self",),),
    "conj": (("self",),),
    "_conj": (("self",),),
    "conj_physical": (("self",),),
    "resolve_conj": (("self",),),
    "resolve_neg": (("self",),),
    "deg2rad": (("self",),),
    "rad2deg": (("self",),),
    "add": (("self", "other"),),
    "sub": (("self", "other"),),
    "subtract": (("self", "other"),),
    "rsub": (("self", "other"),),
    "complex": (("real", "imag"),),
    "copy": (("self", "src"),),
    "mul": (("self",), ("other",)),
    "multiply": (("self",), ("other",)),
    "div": (("self",),),
    "divide": (("self",),),
    "true_divide": (("self",),),
    "ldexp": (("self",),),
    "lerp": (("self", "end"),),
    "addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "addcdiv": (("self", "tensor1"),),
    "where": (("self", "other"),),
    "masked_fill": (("self", "value"),),
}


def nonlinear(op: Op) -> Iterator[Signature]:
    """The rule of an op that is linear in nothing: splits only."""
    yield from broadcast_splits(op)


def linear(sets: tuple[tuple[str, ...], ...]) -> Rule:
    """The rule of an op that is jointly linear in each of `sets` of
    arguments: splits, and a pending sum for each set.
    """

    def rule(op: Op) -> Iterator[Signature]:
        yield from broadcast_splits(op)
        bound = arguments_of(op)
        if bound.get("rounding_mode") is None and keeps_sums(op):
            for names in sets:
                yield from _pending(op, [bound[name] for name in names])

    return rule


def _pending(op: Op, members: list[Any]) -> Iterator[Signature]:
    slots = {member.index for member in members if isinstance(member, Slot)}
    if slots and all(isinstance(member, Slot) or member == 0 for member in members):
        yield Signature(tuple(P if index in slots else R for index in range(len(op.inputs))), (P,))


def prelu(op: Op) -> Iterator[Signature]:
    """prelu: the weight has one entry, or one for each index of the input's dim 1."""
    shape, weight = op.inputs[0].shape, op.inputs[1].shape
    for dim, size in enumerate(shape):
        yield Signature((S(dim), S(0) if dim == 1 and weight == (size,) else R), (S(dim),))


def bucketize(op: Op) -> Iterator[Signature]:
    """bucketize: each element is looked up in the whole list of boundaries."""
    for dim in range(len(op.inputs[0].shape)):
        yield Signature((S(dim), R), (S(dim),))


def glu(op: Op) -> Iterator[Signature]:
    """glu: one half of `dim` gates the other, so it is elementwise along every other dim."""
    shape = op.inputs[0].shape
    for dim in other_dims(len(shape), arguments_of(op)["dim"]):
        yield Signature((S(dim),), (S(dim),))


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(overloads(*_NONLINEAR.split()), nonlinear),
    **{target: linear(sets) for name, sets in _LINEAR.items() for target in overloads(name)},
    "aten.max.other": nonlinear,
    "aten.min.other": nonlinear,
    "aten.bucketize.Tensor": bucketize,
    "aten.prelu.default": prelu,
    "aten.glu.default": glu,
}
