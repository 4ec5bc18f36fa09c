"""Rules of random ops. The caller seeds them: the same numbers where the op's output is whole or pending, others where
it is split.
"""

from collections.abc import Iterator

from autopar.ir.graph import Op
from autopar.sbp.placement import I, P, S
from autopar.sbp.signature import Signature


def dropout(op: Op) -> Iterator[Signature]:
    """Elements are independent; given which are dropped it is linear, and ranks that hold terms drop the same: P -> P,
    mask whole.
    """
    rest = len(op.outputs) - 1
    yield from elementwise(op)
    yield Signature((P,), (P,) + (I,) * rest)


def elementwise(op: Op) -> Iterator[Signature]:
    """A number per element, drawn by itself."""
    for dim in range(len(op.inputs[0].shape)):
        yield Signature((S(dim),), (S(dim),) * len(op.outputs))


def feature_dropout(op: Op) -> Iterator[Signature]:
    """Whole features (dims 0 and 1 name one) are dropped, linear given which."""
    yield from feature_alpha_dropout(op)
    yield Signature((P,), (P,))


def feature_alpha_dropout(op: Op) -> Iterator[Signature]:
    """As `feature_dropout`, but what is dropped becomes a constant: not linear."""
    for dim in range(2):
        yield Signature((S(dim),), (S(dim),))


def like(op: Op) -> Iterator[Signature]:
    """Reads the shape only: splits with it, and is whole whatever the input's elements are."""
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
