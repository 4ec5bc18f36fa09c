"""The rule table: op -> its splitting signatures on one mesh axis; tests/sbp checks every row against the op itself."""

from collections.abc import Callable, Iterable, Mapping

from autopar.ir.graph import Op
from autopar.sbp.rules import (
    attention,
    batched,
    cast,
    conv,
    create,
    custom_function,
    embedding,
    given,
    guard,
    index,
    loss,
    matmul,
    norm,
    pointwise,
    pool,
    random,
    recurrent,
    reduce,
    softmax,
    view,
)
from autopar.sbp.signature import Signature

_FAMILIES = (
    *(pointwise, cast, view, reduce, index, create),
    *(batched, guard, matmul, attention, conv, embedding, loss, norm, pool, random, recurrent, softmax),
)

RULES: Mapping[str, Callable[[Op], Iterable[Signature]]] = {
    target: rule for family in _FAMILIES for target, rule in family.RULES.items()
}


def rule_of(op: Op) -> Callable[[Op], Iterable[Signature]] | None:
    """The op's row of the table, or the rule that a user gave it or its class; None if there is none."""
    return RULES.get(op.target) or users_rule(op)


def users_rule(op: Op) -> Callable[[Op], Iterable[Signature]] | None:
    """The rule that a user gave the op or its class, which has to be checked."""
    return given.given_rule(op) or custom_function.rule_of(op)


def may_sum_gradients(op: Op) -> bool:
    """Whether the op's backward is known to be linear, so that gradients that are pending sums may pass it: true of
    torch's own ops, and of those with a row.
    """
    return op.target in RULES or op.target.startswith(("aten.", "prims.", "autopar."))
