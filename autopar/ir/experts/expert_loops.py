"""Loops over experts: for each the rows that a mask selects, computed row by row and written back to their place.

The loop is found by its `autopar.rows` ops (`ir.experts.keep_rows`). Proved is that expert e's mask is `ids == e`, that
the ids are in the range of the loop's experts, that every op on an expert's rows treats each row by itself, that all
experts do the same with weights of their own, and that rows are only added or written to tensors that nothing reads in
between. TraceError says what is not so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from autopar.errors import TraceError
from autopar.ir.experts.keep_rows import ROWS
from autopar.ir.experts.row_by_row import row_dim
from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of
from autopar.ir.op_facts import PERMUTATIONS, RESHAPES, order_of

SCATTERS = ("aten.index_add.default", "aten.index_put.default")
_SAME_IDS = RESHAPES | {"aten.to.dtype", "aten.detach.default", "aten.contiguous.default", "aten.clone.default"}
_PARTS_OF_IDS = {"aten.select.int", "aten.slice.Tensor"}
_CHOICES = ("aten.topk.default", "aten.max.dim", "aten.sort.default", "aten.sort.stable")
_LARGEST = ("aten.argmax.default", "aten.argsort.default", "aten.argsort.stable")


@dataclass(frozen=True, slots=True)
class Rows:
    """The part that a value has of the rows of `expert`: their coordinate in dim `coordinate` of the ids, or, if that
    is -1, the rows themselves in its dim `dim`.
    """

    ids: str
    expert: int
    coordinate: int = -1
    dim: int = 0


@dataclass(frozen=True)
class Loop:
    """A loop over all experts among the `ids`; `bodies`: for each expert its ops, in corresponding order."""

    ids: Value
    bodies: tuple[tuple[Op, ...], ...]

    @property
    def num_rows(self) -> int:
        """Of all experts together."""
        return math.prod(self.ids.shape)

    def divisor(self, num_coordinates: int) -> int:
        """How many rows have the same first coordinates."""
        return math.prod(self.ids.shape[num_coordinates:])


@dataclass
class Walk:
    """The rows of each value, and the ops on those of each expert."""

    made: Mapping[str, Op]
    rows: dict[str, Rows] = field(default_factory=dict)
    ids: dict[str, Value] = field(default_factory=dict)
    bodies: dict[str, dict[int, list[Op]]] = field(default_factory=dict)


def refuse(op: Op, why: str) -> NoReturn:
    """Raise TraceError for `op`, with the reason and a remedy."""
    raise TraceError(
        f"{op.line}: {op.target} is on rows that are selected by the values of a tensor, and is no part of a loop over"
        f" experts that can be planned: {why}; keep the computation in tensors of fixed shapes, e.g. torch.where with a"
        " mask instead of nonzero() or boolean indexing"
    )


def find_loops(graph: Graph) -> tuple[list[Loop], Walk]:
    """The loops of a graph; each of its `autopar.rows` ops belongs to one."""
    walk = Walk({value.name: op for op in graph.ops for value in op.outputs})
    for op in graph.ops:
        if op.target == ROWS:
            _enter(op, walk)
        elif found := {walk.rows[value.name] for value in op.inputs if value.name in walk.rows}:
            _follow(op, found, walk)
    for value in [*graph.outputs, *(value for _, value in graph.mutations)]:
        if isinstance(value, Value) and value.name in walk.rows:
            refuse(walk.made[value.name], "an expert's rows are an output")
    return [_loop(walk.ids[name], bodies, walk) for name, bodies in walk.bodies.items()], walk


def _enter(op: Op, walk: Walk) -> None:
    ids, expert, dims = _selected(op, op.inputs[0], walk.made)
    walk.ids[ids.name] = ids
    walk.bodies.setdefault(ids.name, {}).setdefault(expert, [])
    walk.rows.update((value.name, Rows(ids.name, expert, dim)) for value, dim in zip(op.outputs, dims))


def _selected(op: Op, mask: Value, made: Mapping[str, Op]) -> tuple[Value, int, tuple[int, ...]]:
    """(ids, expert, dims of the ids in order) of a mask that is `ids == expert` with its dims in that order."""
    known = _of_ids(mask, made)
    ids, expert, dims = known or (mask, None, (None,))
    if expert is None or None in dims:
        refuse(op, "the mask that selects rows is not `ids == expert`, or the part of one_hot(ids) for an expert")
    return ids, expert, tuple(dim for dim in dims if dim is not None)


def _of_ids(value: Value, made: Mapping[str, Op]) -> tuple[Value, int | None, tuple[int | None, ...]] | None:
    """(ids, expert, dims) of a part of one_hot(ids), where None stands for all experts and for their dim."""
    op = made.get(value.name)
    if op is None:
        return None
    if op.target == "aten.eq.Scalar" and type(op.args[1]) is int:
        return op.inputs[0], op.args[1], tuple(range(len(value.shape)))
    if op.target == "aten.one_hot.default":
        return op.inputs[0], None, (*range(len(value.shape) - 1), None)
    inner = _of_ids(op.inputs[0], made) if len(op.inputs) == 1 else None
    if inner is None:
        return None
    ids, expert, dims = inner
    arguments = arguments_of(op)
    if op.target in PERMUTATIONS:
        return ids, expert, tuple(dims[i] for i in order_of(op.target, op.args[1:], len(dims), **dict(op.kwargs)))
    if op.target in ("aten.to.dtype", "aten.detach.default", "aten.alias.default", "aten.contiguous.default"):
        return inner
    is_truth = op.target == "aten.ne.Scalar" and op.args[1] == 0
    if is_truth or (op.target == "aten.eq.Scalar" and op.args[1] is True):
        return inner
    dim = arguments.get("dim", 0)
    at = dim % len(dims) if isinstance(dim, int) else -1
    if at < 0 or dims[at] is not None:
        return None
    rest = dims[:at] + dims[at + 1 :]
    if op.target == "aten.select.int" and expert is None:
        return ids, arguments["index"] % op.inputs[0].shape[at], rest
    if op.target == "aten.slice.Tensor" and expert is None and value.shape[at] == 1 and arguments["step"] == 1:
        return ids, (arguments["start"] or 0) % op.inputs[0].shape[at], dims
    return (ids, expert, rest) if op.target == "aten.squeeze.dim" and expert is not None else None


def _follow(op: Op, found: set[Rows], walk: Walk) -> None:
    if len({(rows.ids, rows.expert) for rows in found}) > 1:
        refuse(op, "it takes rows of several experts")
    first = next(iter(found))
    walk.bodies[first.ids][first.expert].append(op)
    if op.target in SCATTERS and op.inputs[0].name not in walk.rows:
        return
    if op.target in ("aten.index.Tensor", "aten.index_select.default") and op.inputs[0].name not in walk.rows:
        dim = len(lookup(op, walk)[0])
    else:
        dim = _row_dim(op, walk)
    walk.rows.update((value.name, Rows(first.ids, first.expert, -1, dim)) for value in op.outputs)


def lookup(op: Op, walk: Walk) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(leading dims of size 1, coordinates) of what an op reads or writes at an expert's coordinates."""
    if op.target in ("aten.index_select.default", "aten.index_add.default"):
        indices: Sequence[object] = (None,) * (int(arguments_of(op)["dim"]) % len(op.inputs[0].shape)) + (Slot(1),)
    else:
        indices = arguments_of(op)["indices"]
    slots = [index for index in indices if isinstance(index, Slot)]
    free = len(indices) - len(slots)
    coordinates = [walk.rows.get(op.inputs[slot.index].name, Rows("", 0)) for slot in slots]
    ids = next((walk.ids[rows.ids] for rows in coordinates if rows.ids), None)
    given = tuple(rows.coordinate for rows in coordinates)
    if ids is None or given != tuple(range(len(given))) or any(indices[i] is not None for i in range(free)):
        refuse(op, "rows are read or written at something else than their place in the ids")
    shape = op.inputs[0].shape
    if shape[:free] != (1,) * free or shape[free : free + len(given)] != ids.shape[: len(given)]:
        refuse(op, f"{list(shape)} has not the dims of the ids, {list(ids.shape)}")
    return (1,) * free, given


def _row_dim(op: Op, walk: Walk) -> int:
    """The dim that has the rows in the result of an op that treats each row by itself."""
    rows = [walk.rows.get(value.name) for value in op.inputs]
    if any(each is not None and each.coordinate >= 0 for each in rows):
        refuse(op, "it computes with the places of rows")
    dim = row_dim(op, [None if each is None else each.dim for each in rows])
    if dim is not None:
        return dim
    refuse(op, "it does not treat each row by itself")


def _loop(ids: Value, bodies: dict[int, list[Op]], walk: Walk) -> Loop:
    ops = [op for body in bodies.values() for op in body]
    at = ops[0] if ops else next(op for op in walk.made.values() if op.target == ROWS)
    num_ids = _range(ids, walk.made)
    if num_ids is None or sorted(bodies) != list(range(num_ids)):
        refuse(at, f"its experts are {sorted(bodies)}, not all that topk, argmax or max choose among")
    first, *others = (_calls(bodies[expert], walk) for expert in range(num_ids))
    if any(other != first for other in others):
        refuse(at, "the experts differ in what they compute")
    return Loop(ids, tuple(tuple(bodies[expert]) for expert in range(num_ids)))


def _calls(body: Sequence[Op], walk: Walk) -> list[object]:
    """The calls of an expert, equal for experts that do the same with other tensors of the same sizes."""
    number: dict[str, object] = {}
    calls: list[object] = []
    for op in body:
        of_rows = (walk.rows.get(value.name) for value in op.inputs)
        given = (
            None if rows is None else number.get(value.name, rows.coordinate) for value, rows in zip(op.inputs, of_rows)
        )
        sizes = tuple((value.shape, value.dtype) for value in op.inputs)
        calls.append((op.target, repr(op.args), repr(op.kwargs), sizes, tuple(given), op.is_no_grad))
        number.update((value.name, (len(calls), i)) for i, value in enumerate(op.outputs))
    return calls


def _range(ids: Value, made: Mapping[str, Op]) -> int | None:
    """The number of experts that the ids are chosen among; None if that is not known."""
    op = made.get(ids.name)
    while op is not None and op.target in _SAME_IDS | _PARTS_OF_IDS:
        ids, op = op.inputs[0], made.get(op.inputs[0].name)
    if op is None or not (op.target in _LARGEST or (op.target in _CHOICES and op.outputs[-1] == ids)):
        return None
    dim = arguments_of(op)["dim"]
    return None if dim is None else op.inputs[0].shape[dim]


def are_distinct(loop: Loop, made: Mapping[str, Op]) -> bool:
    """Whether no two ids of one token are the same."""
    op, num_ids = made.get(loop.ids.name), loop.ids.shape[-1]
    while op is not None and op.target in _SAME_IDS:
        op = made.get(op.inputs[0].name)
    if len(loop.ids.shape) == 1 or num_ids == 1:
        return True
    if op is None or op.target != "aten.topk.default":
        return False
    shape = op.outputs[-1].shape
    return shape[-1:] == (num_ids,) and arguments_of(op)["dim"] in (-1, len(shape) - 1)
