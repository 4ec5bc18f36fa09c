"""Collectives that an op issues itself when it is run by a local implementation."""

from autopar.ir.graph import Op
from autopar.sbp.local_ops import LOCAL_OPS
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy


def inner_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """What the local implementation of `op` issues in forward and backward; nothing if no axis takes a role."""
    if not any(signature.role for signature in strategy.signatures):
        return ()
    return LOCAL_OPS[op.target].collectives(op, strategy, mesh_shape)
