"""Rules of random ops.

The generated code seeds them so that ranks draw the same numbers on axes on which the op's output is whole or pending,
and different numbers on axes on which it is split.
"""

from collections.abc import Iterator

from autopar.ir.graph import Op
from autopar.sbp.placement import I, P, S
from autopar.sbp.signature import Signature


def dropout(op: Op) -> Iterator[Signature]:
    """Elements are independent. For a given mask dropout is linear, and ranks that hold terms draw the same: P -> P."""
    rest = len(op.outputs) - 1
    yield from elementwise(op)
    yield Signature((P,), (P,) + (I,) * rest)


def elementwise(op: Op) -> Iterator[Signature]:
    """A random number for each element, independent of all others."""
    for dim in range(len(op.inputs[0].shape)):
        yield Signature((S(dim),), (S(dim),) * len(op.outputs))


def feature_dropout(op: Op) -> Iterator[Signature]:
    """Whole features, indexed by dims 0 and 1, are dropped; for a given mask it is linear."""
    yield from feature_alpha_dropout(op)
    yield Signature((P,), (P,))


def feature_alpha_dropout(op: Op) -> Iterator[Signature]:
    """As `feature_dropout`, but dropped features become a constant: not linear."""
    for dim in range(2):
        yield Signature((S(dim),), (S(dim),))


def like(op: Op) -> Iterator[Signature]:
    """Ops that read the shape of their input only: they split with it, and are whole for any placement of it."""
    yield from elementwise(op)
    yield Signature((P,), (I,))


RULES = {
    "aten.dropout.default": dropout,
    "aten.native_dropout.default": dropout,
    "aten.alpha_dropout.default": elementwise,
    "aten.feature_dropout.default": feature_dropout,
    "aten.feature_alpha_dropout.default": feature_alpha_dropout,
    "aten.bernoulli.default": elementwise,
    "aten.bernoulli.p": like,
    "aten.rand_like.default": like,
    "aten.randn_like.default": like,
    "aten.randint_like.default": like,
}
