"""Rules of ops that make a new tensor and read at most the shape of an input.

Proof: all elements are equal (or arbitrary), so any part of the output is the op called with the part's shape; zeros
are also a sum of zeros. The contents of the input are not read: it may be pending.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.placement import I, P, S
from autopar.sbp.signature import Signature

Rule = Callable[[Op], Iterable[Signature]]


def like(op: Op) -> Iterator[Signature]:
    """full_like and similar ops: a part of the input has the shape of the output's part."""
    for dim in range(len(op.inputs[0].shape)):
        yield Signature((S(dim),), (S(dim),))
    yield Signature((P,), (I,))
    if _is_zero(op):
        yield Signature((P,), (P,))


def sized(op: Op) -> Iterator[Signature]:
    """full, new_full and similar ops: the shape is an argument, an input may lie in any way."""
    out = op.outputs[0].shape
    source = op.inputs[0].shape if op.inputs else ()
    for dim, size in enumerate(out):
        yield Signature((I,) * len(op.inputs), (S(dim),))
        if source[dim : dim + 1] == (size,):
            yield Signature((S(dim),), (S(dim),))
    for dim in range(len(source)):
        yield Signature((S(dim),), (I,))
    if op.inputs:
        yield Signature((P,), (I,))


def _is_zero(op: Op) -> bool:
    return "zeros" in op.target or arguments_of(op).get("fill_value") == 0 or arguments_of(op).get("value") == 0


RULES: Mapping[str, Rule] = {
    "aten.zeros_like.default": like,
    "aten.ones_like.default": like,
    "aten.full_like.default": like,
    "aten.empty_like.default": like,
    "aten.fill.Scalar": like,
    "aten.zeros.default": sized,
    "aten.ones.default": sized,
    "aten.full.default": sized,
    "aten.empty.memory_format": sized,
    "aten.new_zeros.default": sized,
    "aten.new_ones.default": sized,
    "aten.new_full.default": sized,
    "aten.new_empty.default": sized,
    # parts draw different random numbers, as for every random op (rules/random.py)
    "aten.rand.default": sized,
    "aten.randn.default": sized,
}
