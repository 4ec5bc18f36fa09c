"""The referee of the rule table for rules of all kinds: local ops, which communicate, are run by threads."""

from functools import partial
from typing import Any

from autopar.ir.graph import Op
from autopar.mesh import Shares
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.proof import check_signature as referee
from autopar.sbp.proof.check_signature import Tensors, make_op
from autopar.sbp.signature import Signature, Strategy
from tests.sbp.simulate import on_threads


def check_signature(op: Op, signature: Signature, num_ranks: int, inputs: Tensors) -> bool:
    """As in the package."""
    return referee.check_signature(op, signature, num_ranks, inputs, on_threads)


def check_strategy(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...], inputs: Tensors) -> bool:
    """As in the package."""
    return referee.check_strategy(op, strategy, mesh_shape, inputs, partial(on_threads, shares=_shares(strategy)))


def _shares(strategy: Strategy) -> Shares:
    each = enumerate((*signature.inputs, *signature.outputs) for signature in strategy.signatures)
    return tuple({axis: one.shares for axis, placed in each for one in placed if one.shares}.items())


def check_rule(op: Op, inputs: Tensors, num_ranks: tuple[int, ...] = (2, 3)) -> set[Signature]:
    """Check every signature of `op`; those that divided evenly on some number of ranks."""
    return {sig for sig in signatures_of(op) for size in num_ranks if check_signature(op, sig, size, inputs)}


def offered(target: str, *args: Any, **kwargs: Any) -> set[str]:
    """The signatures of a call as text, without the whole ones."""
    op, _ = make_op(f"aten.{target}", *args, **kwargs)
    return {
        str(sig) for sig in signatures_of(op) if any(placement.kind in "SP" for placement in sig.inputs + sig.outputs)
    }
