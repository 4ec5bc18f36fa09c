"""Rules of convolutions: products over channels, with the proofs of `_einsum`; spatial dims stay whole."""

from collections.abc import Iterator

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.placement import S
from autopar.sbp.rules._by_name import signature, tensor_of
from autopar.sbp.rules._einsum import Term, products
from autopar.sbp.signature import Signature

NAMES = ("input", "weight", "bias")


def convolution(op: Op) -> Iterator[Signature]:
    """N i .., o i .. (+ o) -> n o .."""
    return _convolution(op, ("o", "i"))


def transposed(op: Op) -> Iterator[Signature]:
    """N i .., i o .. (+ o) -> n o .."""
    return _convolution(op, ("i", "o"))


def _convolution(op: Op, weight: Term) -> Iterator[Signature]:
    num_groups = arguments_of(op)["groups"]
    is_batched = len(tensor_of(op, "input").shape) == len(tensor_of(op, "weight").shape)
    batch: Term = ("n",) if is_batched else ()
    if num_groups == 1:
        rows = products([batch + ("i",), weight], batch + ("o",), [("o",)])
    else:
        rows = products([batch, ()], batch, [()])
        # Groups are independent products: whole groups can be split, in the channels of input, output, weight and bias.
        channels = {"input": S(len(batch)), "weight": S(0), "bias": S(0)}
        yield from signature(op, channels, S(len(batch)), role="channel_groups", num_units=num_groups)
    for placements, placed in rows:
        yield from signature(op, dict(zip(NAMES, placements)), placed)


RULES = {
    "aten.conv1d.default": convolution,
    "aten.conv1d.padding": convolution,
    "aten.conv2d.default": convolution,
    "aten.conv2d.padding": convolution,
    "aten.conv3d.default": convolution,
    "aten.conv_transpose1d.default": transposed,
    "aten.conv_transpose2d.input": transposed,
    "aten.conv_transpose3d.input": transposed,
}
