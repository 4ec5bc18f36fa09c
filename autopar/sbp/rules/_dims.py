"""Functions shared by rules that follow shapes: the dims that correspond, and the signatures that follow from them."""

from collections.abc import Iterable, Iterator

import torch

from autopar.ir.graph import Op
from autopar.sbp.placement import P, Placement, R, S
from autopar.sbp.signature import Signature

Shape = tuple[int, ...]


def overloads(*names: str) -> tuple[str, ...]:
    """Targets of the functional overloads of aten ops that take and return tensors.

    >>> overloads("neg")
    ('aten.neg.default',)
    """
    targets = []
    for name in names:
        packet = getattr(torch.ops.aten, name)
        targets += [
            f"aten.{name}.{overload}"
            for overload in packet.overloads()
            if _is_functional(getattr(packet, overload)._schema)
        ]
    return tuple(targets)


def _is_functional(schema: torch.FunctionSchema) -> bool:
    takes = any(str(arg.type) in ("Tensor", "Optional[Tensor]") and not arg.is_out for arg in schema.arguments)
    gives = bool(schema.returns) and all(str(ret.type) == "Tensor" for ret in schema.returns)
    return takes and gives and not schema.is_mutable and not any(arg.is_out for arg in schema.arguments)


def dim_of(dim: int, ndim: int) -> int:
    """`dim`, which may be negative, counted from the front."""
    return dim % max(ndim, 1)


def aligned(shape: Shape, out: Shape, dim: int) -> Placement:
    """The placement of a broadcast input if the output is split along `dim`: split with it, or R if it is repeated.

    The gradient of a repeated input is a sum over the output's parts, hence R.
    """
    own = dim - (len(out) - len(shape))
    return S(own) if own >= 0 and shape[own] == out[dim] else R


def broadcast_splits(op: Op) -> Iterator[Signature]:
    """A signature for each split output dim, with the inputs split by the rules of broadcasting."""
    out = op.outputs[0].shape
    for dim in range(len(out)):
        yield Signature(tuple(aligned(value.shape, out, dim) for value in op.inputs), (S(dim),) * len(op.outputs))


def carry(op: Op, pairs: Iterable[tuple[int, int]], *, is_linear: bool) -> Iterator[Signature]:
    """Signatures of an op with one input, whose dim `src` becomes dim `dst` of every output for each pair.

    A linear op has P -> P too.
    """
    count = len(op.outputs)
    for src, dst in pairs:
        yield Signature((S(src),), (S(dst),) * count)
    if is_linear and keeps_sums(op):
        yield Signature((P,), (P,) * count)


def other_dims(ndim: int, *dims: int) -> tuple[int, ...]:
    """All of `ndim` dims but `dims`."""
    used = {dim_of(dim, ndim) for dim in dims}
    return tuple(dim for dim in range(ndim) if dim not in used)


def keeps_sums(op: Op) -> bool:
    """Whether a linear op commutes with a pending sum in its result's dtype.

    Rounding float terms to integers does not, nor to floats of 8 bits, which have no sums either.
    """
    dtype = op.outputs[0].dtype
    if dtype.is_floating_point and dtype.itemsize == 1:
        return False
    is_exact = dtype.is_floating_point or dtype.is_complex
    return is_exact or not any(value.dtype.is_floating_point for value in op.inputs)
