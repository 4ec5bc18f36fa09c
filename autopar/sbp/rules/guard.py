"""Rules of ops that read values as a whole: the check of branches, whose output is the checked one, and the matching of
predictions with targets.
"""

from collections.abc import Iterator

from autopar.ir.graph import Op
from autopar.ir.guards.assignments import ASSIGNMENT
from autopar.ir.guards.guard_ops import GUARDED
from autopar.sbp.placement import P, S
from autopar.sbp.rules._by_name import signature, tensor_of
from autopar.sbp.signature import Signature


def guarded(op: Op) -> Iterator[Signature]:
    """autopar.guarded: the identity of its first input."""
    for dim in range(len(tensor_of(op, "self").shape)):
        yield from signature(op, {"self": S(dim)}, S(dim))
    yield from signature(op, {"self": P}, P)


def assignment(op: Op) -> Iterator[Signature]:
    """autopar.linear_sum_assignment: each choice depends on all costs."""
    yield from ()


RULES = {GUARDED: guarded, ASSIGNMENT: assignment}
