"""`proven`: the signatures that a rule of a user gives for a call, after they held on samples of it."""

from autopar.errors import AutoparError, warn
from autopar.ir.graph import Op
from autopar.sbp.proof.discover import prove
from autopar.sbp.proof.sample_calls import NoSample, samples_of
from autopar.sbp.signature import Signature


def proven(op: Op, signatures: tuple[Signature, ...]) -> tuple[Signature, ...]:
    """`signatures`, each true of all samples of the call that it divides; a warning says what no sample tests.

    AutoparError for one that is not true, with the sample.
    """
    for signature in signatures:
        if (len(signature.inputs), len(signature.outputs)) != (len(op.inputs), len(op.outputs)):
            raise AutoparError(
                f"the rule of {op.target} gives {signature}: expected placements of {len(op.inputs)} tensors and"
                f" {len(op.outputs)} results"
            )
        if signature.role:
            raise AutoparError(
                f"the rule of {op.target} gives {signature}: the role {signature.role!r} needs an implementation in"
                " autopar/sbp/local_ops"
            )
    untested = set(signatures)
    try:
        for sample in samples_of(op.nameless) if untested else ():
            for signature in signatures:
                try:
                    untested -= {signature} if prove(signature, sample) else set()
                except Exception as error:  # of the comparison, or of the op, which does not take such parts
                    raise AutoparError(
                        f"the rule of {op.target} is not true: {signature} on {sample.num_ranks} ranks, of the sample"
                        f" {sample}: {type(error).__name__}: {' '.join(str(error).split())}"
                    ) from error
    except NoSample as error:
        warn(f"the rule of {op.target} was not checked: {error}")
        untested = set()
    if untested:
        warn(f"the rule of {op.target} was not checked for {', '.join(map(str, untested))}: no sample has such parts")
    return signatures
