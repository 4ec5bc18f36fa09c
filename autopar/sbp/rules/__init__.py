"""The rule table: op -> its splitting signatures on one mesh axis; tests/sbp checks every row against the op itself."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from autopar.ir.graph import Op
from autopar.ir.loops.body import body_called
from autopar.ir.loops.scan_op import SCAN
from autopar.sbp.rules import (
    append,
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
    loop,
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
from autopar.sbp.rules.complete import SplitDim, completed, own_extents
from autopar.sbp.signature import Signature

_FAMILIES = (
    *(pointwise, cast, view, append, reduce, index, create),
    *(batched, guard, matmul, attention, conv, embedding, loss, norm, pool, random, recurrent, softmax),
)

_OF_STEPS: Mapping[str, Callable[[Op], Iterable[Signature]]] = {
    target: rule for family in _FAMILIES for target, rule in family.RULES.items()
}


@lru_cache(maxsize=4096)
def signatures_within(op: Op) -> tuple[Signature, ...]:
    """The signatures of an op in the body of a loop or function: those of its row, and whole without one."""
    rule = _OF_STEPS.get(op.target)
    return completed(op, rule(op) if rule else (), may_sum=True)


def _scan(op: Op) -> Iterable[Signature]:
    return (way.signature for way in loop.loop_splits(op, signatures_within))


def way_of_loop(op: Op, signature: Signature) -> loop.LoopSplit | None:
    """How the ops in the body of a loop are split; None if they are whole."""
    return loop.way_of(op, signature, signatures_within)


def inner_extents(op: Op, signature: Signature) -> dict[SplitDim, int]:
    """The size of every dim that a loop splits within its body."""
    way = way_of_loop(op, signature)
    if way is None:
        return {}
    return {
        (f"{inner.name} {tensor}", dim): size
        for inner in body_called(op.args[3]).ops
        for (tensor, dim), size in own_extents(inner, way.of_ops[inner.name]).items()
    }


RULES: Mapping[str, Callable[[Op], Iterable[Signature]]] = {**_OF_STEPS, SCAN: _scan}


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
