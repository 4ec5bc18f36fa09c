"""Inner collectives: those that the local implementation of an op issues."""

from autopar.ir.graph import Op
from autopar.sbp.local_ops import LOCAL_OPS, local_target
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy


def inner_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The collectives of the local implementation of `op` in forward and backward; () if no axis takes a role."""
    if not any(signature.role for signature in strategy.signatures):
        return ()
    return LOCAL_OPS[local_target(op.target)].collectives(op, strategy, mesh_shape)
