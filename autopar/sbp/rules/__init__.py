"""The rule table: op -> its splitting signatures on one mesh axis; tests/sbp checks every row against the op itself."""

from collections.abc import Callable, Iterable, Mapping

from autopar.ir.graph import Op
from autopar.sbp.rules import (
    attention,
    cast,
    conv,
    create,
    embedding,
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
    *(matmul, attention, conv, embedding, loss, norm, pool, random, recurrent, softmax),
)

RULES: Mapping[str, Callable[[Op], Iterable[Signature]]] = {
    target: rule for family in _FAMILIES for target, rule in family.RULES.items()
}
