"""Expert routing: regions that sort tokens by expert and restore their order, in which each microbatch sorts for
itself.

A sort mixes all tokens, and the order within a microbatch is not a part of the order of the whole batch. But if the
sorted rows are only processed row by row, or group by group with group sizes counted from the same sorted keys, and
then restored by the inverse of the same order, each row has the same result as in the whole batch: its position in
between does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of
from autopar.ir.interpret import constants_for, run_constants
from autopar.sbp.candidates import signatures_of_call
from autopar.sbp.local_ops.grouped_mm import TARGETS as GROUPED
from autopar.sbp.placement import I, P, R, S
from autopar.sbp.signature import Signature

_SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
_INVERSE = (S(0), S(0), I), (S(0),)  # a signature of index_put that no rule yields


@dataclass(frozen=True, slots=True)
class _Tag:
    """The `kind` of a value with respect to the op called `sort`, which sorts `num_rows` keys.

    Kinds: the sorted "keys", the "order" itself, "tokens" (the order divided by `divisor`), "rows" in that order, the
    "counts" of keys, a "blank" of the order's shape, or the order's "inverse".
    """

    sort: str
    kind: str
    num_rows: int
    divisor: int = 1


@dataclass
class _RoutingTags:
    graph: Graph
    tags: dict[str, _Tag] = field(default_factory=dict)
    # op name -> (sort, signatures of the op)
    signatures: dict[str, tuple[str, tuple[Signature, ...]]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)  # sorts whose order another op reads


def routed_signatures(graph: Graph) -> dict[str, tuple[Signature, ...]]:
    """Name of each op of such regions -> its signatures if each microbatch sorts its tokens by itself.

    S(0) means the microbatch's rows in its order. A region whose order any other op reads is left out.
    """
    walk = _RoutingTags(graph)
    for op in graph.ops:
        _visit(op, walk)
    external = [value.name for value in graph.outputs if isinstance(value, Value)] + [
        value.name for _, value in graph.mutations
    ]
    walk.refused.update(walk.tags[name].sort for name in external if name in walk.tags)
    return {name: found for name, (sort, found) in walk.signatures.items() if sort not in walk.refused}


def inverts_order(op: Op, signature: Signature) -> bool:
    """Whether `op` writes 0, 1, 2, ... into an inverse, of which a microbatch needs as many as it has rows."""
    return op.target == "aten.index_put.default" and (signature.inputs, signature.outputs) == _INVERSE


def _visit(op: Op, walk: _RoutingTags) -> None:
    tags = [walk.tags.get(value.name) for value in op.inputs]
    known_tags = {tag for tag in tags if tag}
    if not known_tags:
        if op.target in _SORTS and len(op.inputs[0].shape) == 1:
            kinds = ("keys", "order")[-len(op.outputs) :]
            made = [_Tag(op.name, kind, op.inputs[0].shape[0]) for kind in kinds]
            _enter(op, walk, op.name, [Signature((S(0),), (S(0),) * len(kinds))], made)
        return
    sort, *others = sorted({tag.sort for tag in known_tags})
    step = None if others else _step(op, tags, walk)
    if step is None:
        walk.refused.update((sort, *others))
    else:
        signatures, tag = step
        _enter(op, walk, sort, signatures, [tag] * len(op.outputs))


def _enter(op: Op, walk: _RoutingTags, sort: str, signatures: list[Signature], tags: Sequence[_Tag | None]) -> None:
    walk.signatures[op.name] = sort, tuple(signatures)
    walk.tags.update((value.name, tag) for value, tag in zip(op.outputs, tags) if tag)


def _step(op: Op, tags: list[_Tag | None], walk: _RoutingTags) -> tuple[list[Signature], _Tag | None] | None:  # noqa: C901 a table
    """(signatures of the op on tagged inputs, tag of its result or None for rows in the batch's order).

    None if the result would depend on the order.
    """
    first = next(tag for tag in tags if tag)
    kinds = [tag.kind if tag else "" for tag in tags]

    def gives(kind: str, divisor: int = 1) -> _Tag:
        return _Tag(first.sort, kind, first.num_rows, divisor)

    match op.target, kinds:
        case "aten.to.dtype", ["keys"]:
            return [Signature((S(0),), (S(0),))], gives("keys")
        case "aten.histc.default", ["keys"]:
            return [fit for fit in signatures_of_call(op) if fit.outputs == (P,) and fit.inputs == (S(0),)], gives(
                "counts"
            )
        case "aten.cumsum.default" | "aten.to.dtype", ["counts"]:
            return [Signature((P,), (P,))], gives("counts")
        case "aten.floor_divide.default", ["order"] if (
            type(op.args[1]) is int and op.args[1] > 0 and first.num_rows % op.args[1] == 0
        ):
            return [Signature((S(0),), (S(0),))], gives("tokens", op.args[1])
        case "aten.empty_like.default" | "aten.zeros_like.default", ["order"]:
            return [Signature((S(0),), (S(0),))], gives("blank")
        case "aten.argsort.default", ["order"]:
            return [Signature((S(0),), (S(0),))], gives("inverse")
        case "aten.index_put.default", ["blank", "order", ""] if _inverts(op, walk.graph):
            return [Signature(*_INVERSE)], gives("inverse")
        case "aten.index.Tensor", ["", "order" | "tokens"] if (
            (order := tags[1]) and op.inputs[0].shape[0] * order.divisor == first.num_rows and _is_plain(op)
        ):
            return [Signature((S(0), S(0)), (S(0),))], gives("rows")
        case "aten.index.Tensor", ["rows", "inverse"] if _is_plain(op):
            return [Signature((S(0), S(0)), (S(0),))], None
        case target, ["rows", "", "counts"] if target in GROUPED:
            return [Signature((S(0), R if op.inputs[1].needs_grad else I, P), (S(0),))], gives("rows")
    if set(kinds) <= {"rows", ""}:
        by_rows = [signature for signature in signatures_of_call(op) if _is_row_by_row(signature, kinds)]
        return (by_rows, gives("rows")) if by_rows else None
    return None


def _is_plain(op: Op) -> bool:
    return op.args[1] == (Slot(1),)


def _is_row_by_row(signature: Signature, kinds: list[str]) -> bool:
    """Whether tagged inputs are split by rows and all others are whole: split, they would be in the batch's order."""
    are_split = all(
        placement == S(0) if kind else placement in (I, R) for placement, kind in zip(signature.inputs, kinds)
    )
    return are_split and not signature.role and all(placement == S(0) for placement in signature.outputs)


def _inverts(op: Op, graph: Graph) -> bool:
    """Whether an index_put writes 0, 1, 2, ... at the positions of an order."""
    numbers = op.inputs[2]
    if numbers.name not in {item.value.name for item in graph.of_kind("constant")} or arguments_of(op)["accumulate"]:
        return False
    value = _constant(graph, numbers.name)
    return _is_plain(op) and value is not None and torch.equal(value, torch.arange(value.numel()))


def _constant(graph: Graph, name: str) -> torch.Tensor | None:
    """The tensor of the constant called `name`; None if it is on the meta device."""
    ops, tensors = constants_for(graph, [name])
    if any(tensor.is_meta for tensor in tensors.values()):
        return None
    item = next(item for item in graph.inputs if item.value.name == name)
    return run_constants(replace(graph, inputs=(item,), constant_ops=ops, constants=tensors), "cpu")[name]
