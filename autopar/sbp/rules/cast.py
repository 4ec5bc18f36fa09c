"""Ops that keep every element where it is: casts and copies.

Proof: each output element is the input element, rounded at most; a sum of rounded terms is the rounded sum up to
rounding, unless the result is an integer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.graph import Op
from autopar.sbp.placement import I, P, S
from autopar.sbp.rules._dims import carry, keeps_sums
from autopar.sbp.signature import Signature


def same(op: Op) -> Iterator[Signature]:
    """Every dim, and pending sums."""
    yield from carry(op, [(dim, dim) for dim in range(len(op.inputs[0].shape))], is_linear=True)


def like_other(op: Op) -> Iterator[Signature]:
    """The second input gives only its dtype and device: it has no gradient, so it may stay whole."""
    for dim in range(len(op.inputs[0].shape)):
        yield Signature((S(dim), I), (S(dim),))
    if keeps_sums(op):
        yield Signature((P, I), (P,))


RULES: Mapping[str, Callable[[Op], Iterable[Signature]]] = {
    "aten.to.dtype": same,
    "aten.to.device": same,
    "aten.to.dtype_layout": same,
    "aten._to_copy.default": same,
    "aten.clone.default": same,
    "aten.detach.default": same,
    "aten.contiguous.default": same,
    "aten.alias.default": same,
    "aten.lift_fresh_copy.default": same,
    "aten.to.other": like_other,
    "aten.type_as.default": like_other,
}
