"""Rules of softmax and similar ops, which normalise by a sum of exponentials along some dims."""

from collections.abc import Iterator

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.placement import I, S
from autopar.sbp.rules._by_name import signature
from autopar.sbp.signature import Signature


def softmax(op: Op) -> Iterator[Signature]:
    """Rows are independent: every other dim splits plainly.

    Along the reduced dim the maximum and the sum are over all ranks (role "reduced"); then each rank has its slice of
    the output.
    """
    rank = len(op.outputs[0].shape)
    for dim in range(rank):
        role = "reduced" if dim == arguments_of(op)["dim"] % rank else ""
        yield from signature(op, {"self": S(dim)}, S(dim), role=role)


def logsumexp(op: Op) -> Iterator[Signature]:
    """As softmax, but along a reduced dim the output is whole after the inner sum, and so is its gradient: each rank
    then has its slice of the input's gradient, I.
    """
    arguments = arguments_of(op)
    rank = len(op.inputs[0].shape)
    reduced = {dim % max(rank, 1) for dim in arguments["dim"]} or set(range(rank))
    for dim in range(rank):
        if dim in reduced:
            yield from signature(op, {"self": S(dim)}, I, role="reduced")
        else:
            before = 0 if arguments["keepdim"] else sum(other < dim for other in reduced)
            yield from signature(op, {"self": S(dim)}, S(dim - before))


RULES = {
    "aten.softmax.int": softmax,
    "aten._safe_softmax.default": softmax,
    "aten.log_softmax.int": softmax,
    "aten.logsumexp.default": logsumexp,
}
