"""What the rules of the shape-following families share: which dims line up, and signatures made from that."""

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
    found = []
    for name in names:
        packet = getattr(torch.ops.aten, name)
        found += [
            f"aten.{name}.{overload}"
            for overload in packet.overloads()
            if _is_functional(getattr(packet, overload)._schema)
        ]
    return tuple(found)


def _is_functional(schema: torch.FunctionSchema) -> bool:
    takes = any(str(arg.type) in ("Tensor", "Optional[Tensor]") and not arg.is_out for arg in schema.arguments)
    gives = bool(schema.returns) and all(str(ret.type) == "Tensor" for ret in schema.returns)
    return takes and gives and not schema.is_mutable and not any(arg.is_out for arg in schema.arguments)


def dim_of(dim: int, ndim: int) -> int:
    """`dim` counted from the front."""
    return dim % max(ndim, 1)


def aligned(shape: Shape, out: Shape, dim: int) -> Placement:
    """Placement of a broadcast input when the output is split along `dim`: split with it, or whole where it is
    repeated.

    A repeated input's gradient is summed over the output's parts, hence R.
    """
    own = dim - (len(out) - len(shape))
    return S(own) if own >= 0 and shape[own] == out[dim] else R


def broadcast_splits(op: Op) -> Iterator[Signature]:
    """Every output dim split, inputs following by the broadcasting rules."""
    out = op.outputs[0].shape
    for dim in range(len(out)):
        yield Signature(tuple(aligned(value.shape, out, dim) for value in op.inputs), (S(dim),) * len(op.outputs))


def carry(op: Op, pairs: Iterable[tuple[int, int]], *, is_linear: bool) -> Iterator[Signature]:
    """First input: its dim `src` becomes dim `dst` of every output, for each pair; a linear op passes P too. No other
    input.
    """
    count = len(op.outputs)
    for src, dst in pairs:
        yield Signature((S(src),), (S(dst),) * count)
    if is_linear and keeps_sums(op):
        yield Signature((P,), (P,) * count)


def other_dims(ndim: int, *dims: int) -> tuple[int, ...]:
    """All dims but those."""
    used = {dim_of(dim, ndim) for dim in dims}
    return tuple(dim for dim in range(ndim) if dim not in used)


def keeps_sums(op: Op) -> bool:
    """Whether a linear op commutes with a pending sum in its result's dtype: an integer result would round each float
    term.
    """
    is_exact = op.outputs[0].dtype.is_floating_point or op.outputs[0].dtype.is_complex
    return is_exact or not any(value.dtype.is_floating_point for value in op.inputs)
