"""Losses of flattened tokens, whose sequence may be split though the flattened dim is split by samples only.

Models flatten logits [batch, tokens, classes] and targets [batch, tokens] before the loss. A part of the tokens of each
sample is no part of the flattened dim in its order, but the sum or the mean of the loss does not depend on the order.
So the flattened values have placement L, the rows of the rank's own tokens, in one order for logits and targets.
"""

import math

from autopar.ir.graph import Graph, Op, Value, arguments_of
from autopar.ir.op_facts import RESHAPES
from autopar.sbp.analysis.expert_routing import routed_signatures
from autopar.sbp.op_signatures import signatures_of_call
from autopar.sbp.placement import I, L, P, R, S
from autopar.sbp.rules.loss import MEAN, NONE
from autopar.sbp.signature import Signature

_LOSS = "aten.cross_entropy_loss.default"
_CAST = "aten.to.dtype"
# Ops on values of which one axis splits samples in the order of all, and another the tokens of each.
BY_SAMPLE_AND_TOKEN = RESHAPES | {_LOSS, _CAST}


def own_order_signatures(graph: Graph) -> dict[str, tuple[Signature, ...]]:
    """Op name -> its signatures on rows in each rank's own order: tokens sorted by expert, and flattened ones."""
    found = routed_signatures(graph)
    for name, signatures in flattened_signatures(graph).items():
        found[name] = found.get(name, ()) + signatures
    return found


def flattened_signatures(graph: Graph) -> dict[str, tuple[Signature, ...]]:
    """Name of each op from a flattening of tokens to a loss of them -> its signatures where the tokens are split."""
    losses = [op for op in graph.ops if op.target == _LOSS and arguments_of(op)["reduction"] != NONE]
    if not losses:
        return {}
    makers = {value.name: op for op in graph.ops for value in op.outputs}
    found: dict[str, tuple[Signature, ...]] = {}
    for loss in losses:
        paths = [_path(value, graph, makers) for value in loss.inputs[:2]]
        if all(paths) and len({_tokens(path[-1]) for path in paths}) == 1 and len(loss.inputs[1].shape) == 1:
            others = tuple(R if value.needs_grad else I for value in loss.inputs[2:])
            role = "tokens" if arguments_of(loss)["reduction"] == MEAN else ""
            found[loss.name] = (Signature((L(0), L(0), *others), (P,), role),)
            for path in paths:
                found.update((op.name, (Signature((L(0),), (L(0),)),)) for op in path[:-1])
                found[path[-1].name] = (Signature((S(1),), (L(0),)),)
    return found


def _path(value: Value, graph: Graph, makers: dict[str, Op]) -> list[Op]:
    """The ops from `value` back to where its tokens are flattened, which read one tensor row by row; else ()."""
    path: list[Op] = []
    while (op := makers.get(value.name)) is not None and _is_read_once(value, graph):
        path.append(op)
        if _tokens(op):
            return path
        if len(op.inputs) != 1 or Signature((S(0),), (S(0),)) not in signatures_of_call(op):
            return []
        value = op.inputs[0]
    return []


def _is_read_once(value: Value, graph: Graph) -> bool:
    return len(graph.uses.get(value.name, ())) == 1


def _tokens(op: Op) -> tuple[int, ...]:
    """The samples and tokens that the op makes one dim; () if it does not."""
    if op.target not in RESHAPES or len(op.inputs) != 1 or len(op.inputs[0].shape) < 2:
        return ()
    before, after = op.inputs[0].shape, op.outputs[0].shape
    is_flat = after == (math.prod(before[:2]), *before[2:]) and min(before[:2]) > 1
    return before[:2] if is_flat else ()
