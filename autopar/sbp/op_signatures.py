"""The signatures of an op on one mesh axis, and the sizes that they split."""

from collections.abc import Iterable

from autopar.ir.function_ops import is_function
from autopar.ir.graph import Op
from autopar.ir.loops.scan_op import SCAN
from autopar.sbp.functions.function_signatures import function_extents, function_signatures
from autopar.sbp.proof.discover import discovered
from autopar.sbp.proof.prove_rule import proven
from autopar.sbp.rules import RULES, inner_extents, may_sum_gradients, rule_of
from autopar.sbp.rules.complete import SplitDim, completed, own_extents
from autopar.sbp.rules.given import per_rules
from autopar.sbp.signature import Discovery, Signature


def signatures_of_call(op: Op) -> tuple[Signature, ...]:
    """`signatures_of(op)`, computed once for equal calls."""
    return signatures_of(op.nameless)


@per_rules
def signatures_of(op: Op) -> tuple[Signature, ...]:
    """The distinct signatures of `op` on one mesh axis: all I, all R (where gradients may be pending sums), then those
    of its rule that split no dim of size 1.

    A rule that a user gave is checked; a custom function without one splits as its ops do, and what has neither is run
    on samples. AutoparError for a rule that is not
    true.
    """
    return completed(op, _splitting(op), may_sum=may_sum_gradients(op))


def discovery_of(op: Op) -> Discovery | None:
    """The rule that running an op on samples gives; None for an op that has a rule, whose own ops tell, or that is to
    stay whole.
    """
    is_own = op.target.startswith("autopar")  # which are whole for a reason
    if op.is_kept_whole or is_own or rule_of(op) is not None or function_signatures(op):
        return None
    return discovered(op.nameless)


def _splitting(op: Op) -> Iterable[Signature]:
    rule = rule_of(op)
    if rule is None:
        found = discovery_of(op)
        return function_signatures(op) if found is None else found.signatures
    return rule(op) if op.target in RULES else proven(op, tuple(rule(op)))


def extents_of(op: Op, signature: Signature) -> dict[SplitDim, int]:
    """The size of every dim and unit that the signature splits, outputs first, and of those within a loop's body or a
    custom function.
    """
    own = own_extents(op, signature)
    if is_function(op):
        return own | function_extents(op, signature)
    return own | inner_extents(op, signature) if op.target == SCAN else own
