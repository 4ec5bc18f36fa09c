"""Expert routing: regions that sort tokens by expert and restore their order, in which each rank, or each microbatch,
sorts its own tokens (local routing).

A sort mixes all tokens, and the order of a part of them is not a part of the order of all. But if the sorted rows are
only processed row by row, or group by group with group sizes counted from the same sorted keys, and then restored by
the inverse of the same order, each row has the same result as among all: its position in between does not matter.
Values in between have placement L, from and to which nothing is converted, so that all ops of a region take part on the
same mesh axes. The gradient of a row is that of the same row among all; that of a weight sums over rows: R.

Where an expert is a group of a grouped product, the rows may also be exchanged by expert (`sbp.exchange`): the first
product sends them to their experts, the last one sends its rows back, and in between they have placement E, on which
each rank has all rows of its own experts, so that the gradient of these experts' weights is whole: S(0).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of
from autopar.ir.interpret import constants_for, run_constants
from autopar.sbp.local_ops.grouped_mm import TARGETS as GROUPED
from autopar.sbp.localize import LOCAL_ARGUMENTS
from autopar.sbp.op_signatures import signatures_of_call
from autopar.sbp.placement import E, I, L, P, Placement, R, S
from autopar.sbp.signature import BETWEEN, COMBINE, DISPATCH, EXCHANGES, Signature

_SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
INVERSE = "inverse"  # the role of an index_put that writes 0, 1, 2, ..., of which a part needs as many as it has rows
_PASSED = Signature((L(0),), (L(0),))
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class _Tag:
    """The `kind` of a value with respect to the op called `sort`, which sorts `num_rows` keys.

    Kinds: the sorted "keys", the "order" itself, "tokens" (the order divided by `divisor`), "rows" in that order, the
    "counts" of keys, a "blank" of the order's shape, the order's "inverse", or a "wide" order or tokens, each repeated
    along dims behind it. `is_at_experts`: of rows, whether they may be those of a rank's experts.
    """

    sort: str
    kind: str
    num_rows: int
    divisor: int = 1
    is_at_experts: bool = False


@dataclass
class _RoutingTags:
    graph: Graph
    tags: dict[str, _Tag] = field(default_factory=dict)
    # op name -> (sort, signatures of the op)
    signatures: dict[str, tuple[str, tuple[Signature, ...]]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)  # sorts whose order another op reads
    # sort -> what its ops take for the number of experts and for the counts of their rows: each must be one
    experts: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    counts: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    counting: dict[str, bool] = field(default_factory=dict)  # value -> whether it is 0, 1, 2, ...
    # first slice of a value, as a microbatch reads it of a constant -> the value
    first_of: dict[str, str] = field(default_factory=dict)
    sorted_ids: dict[str, str] = field(default_factory=dict)  # sort -> what it sorts


def routed_signatures(graph: Graph) -> dict[str, tuple[Signature, ...]]:
    """Name of each op of such regions -> its signatures on an axis whose ranks, or microbatches, sort their own tokens.

    A region whose order any other op reads is left out. All ops of a region divide by the same numbers of ranks.
    """
    if not any(op.target in _SORTS for op in graph.ops):
        return {}
    walk = _RoutingTags(graph)
    for op in graph.ops:
        _visit(op, walk)
    external = [value.name for value in graph.outputs if isinstance(value, Value)] + [
        value.name for _, value in graph.mutations
    ]
    walk.refused.update(walk.tags[name].sort for name in external if name in walk.tags)
    roles: defaultdict[str, set[str]] = defaultdict(set)
    for sort, found in walk.signatures.values():
        roles[sort].update(one.role for one in found)
    num_units: defaultdict[str, int] = defaultdict(int)
    for op in (op for op in graph.ops if op.name in walk.signatures):
        sort, found = walk.signatures[op.name]
        split = (zip(one.inputs + one.outputs, op.inputs + op.outputs) for one in found if one.role not in EXCHANGES)
        sizes = (value.shape[0] for placed in split for placement, value in placed if placement.is_split)
        num_units[sort] = math.gcd(num_units[sort], *sizes)
    return {
        name: tuple(
            replace(one, num_units=num_units[sort])
            for one in found
            if not _is_at_experts(one) or (COMBINE in roles[sort] and _agree(sort, walk))
        )
        for name, (sort, found) in walk.signatures.items()
        if sort not in walk.refused
    }


def num_exchanged(graph: Graph) -> int:
    """The number of experts between which rows can be exchanged, their greatest common divisor; 0 if there are none."""
    routed = routed_signatures(graph)
    at_experts = (op for op in graph.ops if any(one.role == DISPATCH for one in routed.get(op.name, ())))
    return math.gcd(*(op.inputs[1].shape[0] for op in at_experts))


def _is_at_experts(signature: Signature) -> bool:
    """Whether an op has rows of each rank's experts."""
    return any(placement.kind == "E" for placement in signature.inputs + signature.outputs)


def _agree(sort: str, walk: _RoutingTags) -> bool:
    return _UNKNOWN not in walk.experts[sort] and len(walk.experts[sort]) == len(walk.counts[sort]) == 1


def _visit(op: Op, walk: _RoutingTags) -> None:
    tags = [walk.tags.get(value.name) for value in op.inputs]
    known_tags = {tag for tag in tags if tag}
    if not known_tags:
        if op.target in _SORTS and len(op.inputs[0].shape) == 1:
            kinds = ("keys", "order")[-len(op.outputs) :]
            walk.sorted_ids[op.name] = op.inputs[0].name
            walk.experts[op.name].update({_UNKNOWN} if arguments_of(op)["descending"] else ())
            made = [_Tag(op.name, kind, op.inputs[0].shape[0]) for kind in kinds]
            _enter(op, walk, op.name, [Signature((S(0),), (L(0),) * len(kinds))], made)
        elif op.target == "aten.slice.Tensor" and op.args[1:3] == (0, 0) and len(op.args) == 4:
            walk.first_of[op.outputs[0].name] = op.inputs[0].name
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

    def gives(kind: str, divisor: int = 1, *, is_at_experts: bool = False) -> _Tag:
        return _Tag(first.sort, kind, first.num_rows, divisor, is_at_experts)

    match op.target, kinds:
        case "aten.to.dtype", ["keys"]:
            return [_PASSED], gives("keys")
        case "aten.histc.default", ["keys"] if Signature((S(0),), (P,)) in signatures_of_call(op):
            walk.experts[first.sort].add(_num_counted(op))
            return [Signature((L(0),), (L(),))], gives("counts")
        case "aten.cumsum.default" | "aten.to.dtype", ["counts"]:
            return [Signature((L(),), (L(),))], gives("counts")
        case "aten.floor_divide.default", ["order"] if (
            type(op.args[1]) is int and op.args[1] > 0 and first.num_rows % op.args[1] == 0
        ):
            return [_PASSED], gives("tokens", op.args[1])
        case "aten.empty_like.default" | "aten.zeros_like.default", ["order"]:
            return [_PASSED], gives("blank")
        case "aten.argsort.default", ["order"]:
            return [_PASSED], gives("inverse")
        case "aten.index_put.default", ["blank", "order", ""] if _inverts(op, walk):
            return [Signature((L(0), L(0), I), (L(0),), INVERSE)], gives("inverse")
        case "aten.reshape.default" | "aten.expand.default", ["order" | "tokens" | "wide"] if _repeats(op):
            return [_PASSED], gives("wide", first.divisor)
        case "aten.index.Tensor", ["", "order"] if op.inputs[0].name == walk.sorted_ids[first.sort] and _is_plain(op):
            return [Signature((S(0), L(0)), (L(0),))], gives("keys")
        case _, ["", *places] if moved := _at_places(op, places, first):
            return moved
        case "aten.index.Tensor", ["", "keys"] if _is_plain(op):  # what belongs to the row's expert
            walk.experts[first.sort].add(op.inputs[0].shape[0])
            by_expert = Signature((S(0), L(0)), (E(0),), BETWEEN)
            return [Signature((_whole(op.inputs[0]), L(0)), (L(0),)), by_expert], gives("rows", is_at_experts=True)
        case "aten.index.Tensor", ["rows" | "keys", "inverse"] if _is_plain(op):
            return [Signature((L(0), L(0)), (S(0),))], None
        case target, ["rows", "", "counts"] if target in GROUPED:
            local = Signature((L(0), _whole(op.inputs[1]), L()), (L(0),))
            walk.experts[first.sort].add(op.inputs[1].shape[0])
            walk.counts[first.sort].add(op.inputs[2].name)
            return [local, *_at_experts(tags[0])], gives("rows", is_at_experts=True)
    if set(kinds) <= {"rows", "keys", ""} and all(value.shape[:1] == (first.num_rows,) for value in op.outputs):
        by_rows = [fit for fit in signatures_of_call(op) if _is_row_by_row(fit, kinds)]
        # E has as many rows as there are, which must not be written into arguments
        is_at_experts = all(tag.is_at_experts for tag in tags if tag) and op.target not in LOCAL_ARGUMENTS
        placements = (L(0), E(0)) if is_at_experts else (L(0),)
        own = [_in_own_order(fit, kinds, placement) for fit in by_rows for placement in placements]
        return (own, gives("rows", is_at_experts=is_at_experts)) if own else None
    return None


def _num_counted(op: Op) -> int:
    """The number of ids that histc counts, if each is a bin of its own."""
    bins, low, high = (arguments_of(op)[name] for name in ("bins", "min", "max"))
    return bins if low == 0 and high in (bins - 1, bins) else _UNKNOWN


def _at_experts(rows: _Tag | None) -> tuple[Signature, ...]:
    """The signatures of a grouped product that has each rank's experts, for rows that may be sent to them or are
    there.
    """
    if rows is None or not rows.is_at_experts:
        return (Signature((L(0), S(0), L()), (E(0),), DISPATCH),)
    return tuple(Signature((E(0), S(0), L()), (to,), role) for to, role in ((L(0), COMBINE), (E(0), BETWEEN)))


def _whole(value: Value) -> Placement:
    """The placement of a value that all ranks read whole, with a gradient that sums over their rows."""
    return R if value.needs_grad else I


def _is_plain(op: Op) -> bool:
    return op.args[1] == (Slot(1),)


def _repeats(op: Op) -> bool:
    """Whether each of n elements is repeated along dims behind it: [n] becomes [n, 1], or that is expanded."""
    given, made = op.inputs[0].shape, op.outputs[0].shape
    is_reshape = op.target == "aten.reshape.default"
    return given[:1] == made[:1] == (math.prod(given),) and (is_reshape or len(given) == len(made))


def _at_places(op: Op, kinds: list[str], places: _Tag) -> tuple[list[Signature], _Tag | None] | None:
    """As `_step`, of an op that reads rows at places of tokens, or puts them there."""
    match kinds:
        case ["order" | "tokens" | "wide"] if _reads(op, places):
            return [Signature((S(0), L(0)), (L(0),))], _Tag(places.sort, "rows", places.num_rows)
        case ["order" | "tokens" | "wide", "rows"] if _writes(op, places):
            return [Signature((S(0), L(0), L(0)), (S(0),))], None
    return None


def _reads(op: Op, places: _Tag) -> bool:
    """Whether an op reads rows of all tokens, its first input, at such places."""
    (tokens, index), (rows,) = op.inputs, op.outputs
    if tokens.shape[0] * places.divisor != places.num_rows or rows.shape != (places.num_rows, *tokens.shape[1:]):
        return False
    if op.target == "aten.index.Tensor":
        return _is_plain(op) and places.kind != "wide"
    is_along_tokens = arguments_of(op).get("dim") == 0
    return is_along_tokens and (
        (op.target == "aten.index_select.default" and places.kind != "wide")
        or (op.target == "aten.gather.default" and index.shape == rows.shape)
    )


def _writes(op: Op, places: _Tag) -> bool:
    """Whether an op adds rows to all tokens, its first input, at such places, or writes one to each."""
    tokens, index, rows = op.inputs
    arguments = arguments_of(op)
    if tokens.shape[0] * places.divisor != places.num_rows or rows.shape != (places.num_rows, *tokens.shape[1:]):
        return False
    if op.target == "aten.index_put.default":
        return _is_plain(op) and places.kind != "wide" and (bool(arguments["accumulate"]) or places.divisor == 1)
    is_along_tokens = arguments.get("dim") == 0
    return is_along_tokens and (
        (op.target == "aten.index_add.default" and places.kind != "wide")
        or (op.target == "aten.scatter_add.default" and index.shape == rows.shape)
    )


def _is_row_by_row(signature: Signature, kinds: list[str]) -> bool:
    """Whether tagged inputs are split by rows and all others are whole: split, they would be in the batch's order."""
    are_split = all(
        placement == S(0) if kind else placement in (I, R) for placement, kind in zip(signature.inputs, kinds)
    )
    return are_split and not signature.role and all(placement == S(0) for placement in signature.outputs)


def _in_own_order(signature: Signature, kinds: list[str], own: Placement) -> Signature:
    """A signature that splits rows, for rows in the `own` order of a rank."""
    inputs = (own if kind else placement for placement, kind in zip(signature.inputs, kinds))
    return Signature(tuple(inputs), (own,) * len(signature.outputs))


def _inverts(op: Op, walk: _RoutingTags) -> bool:
    """Whether an index_put writes 0, 1, 2, ... at the positions of an order."""
    name = op.inputs[2].name
    if name not in walk.counting:
        walk.counting[name] = _counts_up(walk.graph, walk.first_of.get(name, name))
    return _is_plain(op) and not arguments_of(op)["accumulate"] and walk.counting[name]


def _counts_up(graph: Graph, name: str) -> bool:
    """Whether this is a constant 0, 1, 2, ...; not if it is on the meta device.

    A range tells by its arguments: of all tokens of a batch it would be gigabytes.
    """
    if name not in {item.value.name for item in graph.of_kind("constant")}:
        return False
    ops, tensors = constants_for(graph, [name])
    if any(tensor.is_meta for tensor in tensors.values()):
        return False
    if len(ops) == 1 and ops[0].target.startswith("aten.arange."):
        arguments = arguments_of(ops[0])
        return arguments.get("start", 0) == 0 and arguments.get("step", 1) == 1
    item = next(item for item in graph.inputs if item.value.name == name)
    value = run_constants(replace(graph, inputs=(item,), constant_ops=ops, constants=tensors), "cpu")[name]
    return torch.equal(value, torch.arange(value.numel()))
