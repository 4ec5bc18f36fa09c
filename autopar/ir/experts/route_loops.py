"""The pass that computes all experts of a loop at once: sorted rows, grouped products, and the restored order.

Such regions may run on a rank's own rows or on those of its own experts (`sbp/analysis/expert_routing.py`), and no
shape in them depends on values.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from autopar.ir.call_args import fill
from autopar.ir.experts.expert_loops import SCATTERS, Loop, Walk, are_distinct, find_loops, lookup, refuse
from autopar.ir.experts.grouped_linear import GROUPED_LINEAR
from autopar.ir.experts.keep_rows import ROWS
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.graph import Graph, Op, Value, arguments_of
from autopar.ir.op_facts import PERMUTATIONS, order_of
from autopar.ir.passes.common_subexpressions import merge_duplicates

_PRODUCTS = ("aten.linear.default", "aten.matmul.default", "aten.mm.default")
_BINARY = frozenset(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))


def route_loops(graph: Graph) -> Graph:
    """`graph` with each loop over experts so; TraceError for rows that are selected otherwise."""
    if not any(op.target == ROWS for op in graph.ops):
        return graph
    graph = merge_duplicates(graph)
    loops, walk = find_loops(graph)
    names = {op.name for op in graph.ops} | {value.name for op in graph.ops for value in op.outputs}
    names |= {item.value.name for item in graph.inputs}
    dropped: set[str] = {op.name for op in graph.ops if op.target == ROWS}
    added: dict[str, tuple[Op, ...]] = {}
    renamed: dict[str, Value] = {}
    for loop in loops:
        routed = _Routed(graph, loop, walk, OpBuilder(used_names=names))
        routed.emit()
        dropped.update(op.name for body in loop.bodies for op in body)
        added[routed.last.name] = tuple(routed.builder.ops)
        renamed |= routed.results

    def current(value: Any) -> Any:
        return renamed.get(value.name, value) if isinstance(value, Value) else value

    ops = (new for op in graph.ops for new in (*((op,) if op.name not in dropped else ()), *added.get(op.name, ())))
    return replace(
        graph,
        ops=tuple(replace(op, inputs=tuple(map(current, op.inputs))) for op in ops),
        outputs=tuple(map(current, graph.outputs)),
        mutations=tuple((fqn, current(value)) for fqn, value in graph.mutations),
    )


@dataclass
class _Routed:
    """The ops of a loop's experts at once; `now`: name of a value of the first expert -> the value for all rows.

    `results`: name of a tensor that the loop has written -> its value.
    """

    graph: Graph
    loop: Loop
    walk: Walk
    builder: OpBuilder
    now: dict[str, Value] = field(default_factory=dict)
    results: dict[str, Value] = field(default_factory=dict)
    known: dict[Any, Value] = field(default_factory=dict)
    read_back: set[str] = field(default_factory=set)  # rows of what is written, which `x[rows] += y` reads
    added: set[str] = field(default_factory=set)  # and y, which it writes with them added

    @property
    def last(self) -> Op:
        """The op of the loop that comes last, behind which all that it reads is known."""
        names = {op.name for body in self.loop.bodies for op in body}
        return next(op for op in reversed(self.graph.ops) if op.name in names)

    def emit(self) -> None:
        for place, op in enumerate(self.loop.bodies[0]):
            copies = [body[place] for body in self.loop.bodies]
            if op.target in SCATTERS and op.inputs[0].name not in self.walk.rows:
                self._scatter(copies)
            elif op.target in ("aten.index.Tensor", "aten.index_select.default") and (
                op.inputs[0].name not in self.walk.rows
            ):
                self._lookup(copies)
            else:
                self._compute(copies)

    def _call(self, op: Op, target: str, *args: Any, **kwargs: Any) -> Value:
        at = Origin(op.outputs[0].name, op.module, op.line, op.is_no_grad)
        return self.builder.emit(target, args, kwargs, at=at)[0]

    def _order(self, op: Op, kind: str) -> Value:
        """The "keys", sorted, their "order", its "inverse", or the "offs" of the experts' rows."""
        if kind not in self.known:
            at = Origin("experts", op.module, op.line, True)
            flat = self.builder.emit("aten.reshape.default", (self.loop.ids, (self.loop.num_rows,)), at=at)[0]
            named = {"stable": True, "dim": 0, "descending": False}
            keys, order = self.builder.emit("aten.sort.stable", (flat,), named, at=at)
            num = len(self.loop.bodies)
            as_float = self.builder.emit("aten.to.dtype", (keys, torch.float32), at=at)[0]
            counts = self.builder.emit("aten.histc.default", (as_float, num, 0, num - 1), at=at)[0]
            offs = self.builder.emit("aten.cumsum.default", (counts, 0), {"dtype": torch.int32}, at=at)[0]
            inverse = self.builder.emit("aten.argsort.default", (order,), at=at)[0]
            self.known |= {"keys": keys, "order": order, "offs": offs, "inverse": inverse}
        return self.known[kind]

    def _lookup(self, copies: Sequence[Op]) -> None:
        """Of a tensor with a row for each token, or for each id, that of each row."""
        op = copies[0]
        ones, coordinates = lookup(op, self.walk)
        source = self._one(copies, 0)
        if source is None:
            if not self._is_written(op.inputs[0]):
                refuse(op, "the experts read rows of different tensors")
            self.read_back.add(op.outputs[0].name)
            return
        divisor = self.loop.divisor(len(coordinates))
        rest = source.shape[len(ones) + len(coordinates) :]
        flat = self._call(op, "aten.reshape.default", source, (self.loop.num_rows // divisor, *rest))
        places = self._order(op, "order")
        if divisor > 1:
            places = self._call(op, "aten.floor_divide.default", places, divisor)
        rows = self._call(op, "aten.index.Tensor", flat, (places,))
        shape = (*ones, *rows.shape)
        self.now[op.outputs[0].name] = self._call(op, "aten.reshape.default", rows, shape) if ones else rows

    def _one(self, copies: Sequence[Op], slot: int) -> Value | None:
        """The input of all experts; None if they have one each."""
        inputs = [op.inputs[slot] for op in copies]
        return inputs[0] if all(value.name == inputs[0].name for value in inputs) else None

    def _compute(self, copies: Sequence[Op]) -> None:
        op = copies[0]
        slots = range(len(op.inputs))
        given = [self.now.get(op.inputs[i].name) or self._one(copies, i) for i in slots]
        own = [slot for slot in slots if given[slot] is None]
        if any(value.name in self.read_back for value in op.inputs):
            self._added(op)
        elif any(value.name in self.added for value in op.inputs):
            refuse(op, "rows that are added to a tensor are read before they are")
        elif not own:
            args, kwargs = fill(op.args, given), {name: fill(value, given) for name, value in op.kwargs}
            at = Origin(op.outputs[0].name, op.module, op.line, op.is_no_grad)
            made = self.builder.emit(op.target, args, kwargs, at=at)
            self.now.update((old.name, new) for old, new in zip(op.outputs, made))
        elif op.target in _PRODUCTS and given[0] is not None:
            self.now[op.outputs[0].name] = self._product(copies, given[0], own)
        elif op.target in _BINARY and len(own) == 1:
            args = [*given]
            args[own[0]] = self._of_each_row(op, [copy.inputs[own[0]] for copy in copies], op.outputs[0].shape)
            kwargs = {name: fill(value, args) for name, value in op.kwargs}
            self.now[op.outputs[0].name] = self._call(op, op.target, *fill(op.args, args), **kwargs)
        else:
            refuse(op, "with parameters of each expert it can only take products, sums and factors")

    def _added(self, op: Op) -> None:
        """x[rows] + y of `x[rows] += y`: y, which is added to x in the end."""
        rest = [self.now[value.name] for value in op.inputs if value.name in self.now]
        if op.target != "aten.add.Tensor" or len(rest) != 1 or len(op.inputs) != 2 or op.kwargs:
            refuse(op, "rows of a tensor that is written are read, and not only added to")
        self.now[op.outputs[0].name] = rest[0]
        self.added.add(op.outputs[0].name)

    def _product(self, copies: Sequence[Op], rows: Value, own: Sequence[int]) -> Value:
        op = copies[0]
        flat = rows if len(rows.shape) == 2 else self._call(op, "aten.reshape.default", rows, (self.loop.num_rows, -1))
        if math.prod(rows.shape[:-1]) != self.loop.num_rows:
            refuse(op, "rows of more than one vector are multiplied by weights of each expert")
        if 1 in own:
            weight = self._stacked(op, [copy.inputs[1] for copy in copies])
            if len(weight.shape) != 3:
                refuse(op, "the weight of an expert is no matrix")
            if op.target != "aten.linear.default":
                weight = self._call(op, "aten.permute.default", weight, (0, 2, 1))
            out = self._call(op, GROUPED_LINEAR, flat, weight, self._order(op, "offs"))
        else:
            out = self._call(op, op.target, flat, op.inputs[1])
        if 2 in own:
            bias = self._of_each_row(op, [copy.inputs[2] for copy in copies], out.shape)
            out = self._call(op, "aten.add.Tensor", out, bias)
        elif len(op.inputs) > 2:
            out = self._call(op, "aten.add.Tensor", out, op.inputs[2])
        return out if len(rows.shape) == 2 else self._call(op, "aten.reshape.default", out, op.outputs[0].shape)

    def _of_each_row(self, op: Op, values: Sequence[Value], shape: tuple[int, ...]) -> Value:
        """The vector, or the number, of the expert of each row."""
        if len(values[0].shape) > 1 or len(shape) != 2:
            refuse(op, "what each expert adds or multiplies by is no vector")
        table = self._stacked(op, values)
        rows = self._call(op, "aten.index.Tensor", table, (self._order(op, "keys"),))
        return rows if len(rows.shape) == 2 else self._call(op, "aten.reshape.default", rows, (self.loop.num_rows, 1))

    def _stacked(self, op: Op, values: Sequence[Value]) -> Value:
        """The tensors of all experts as one, the tensor itself whose parts they are."""
        key = tuple(value.name for value in values)
        if key not in self.known:
            makers = [self.walk.made.get(value.name) for value in values]
            found = None
            if all(maker is not None and maker.target == "aten.select.int" for maker in makers):
                found = _selected_from([maker for maker in makers if maker is not None])
            first = makers[0]
            if found is None and first is not None and first.target in PERMUTATIONS and _are_alike(makers, first):
                inner = self._stacked(op, [maker.inputs[0] for maker in makers if maker is not None])
                ndim = len(first.inputs[0].shape)
                order = order_of(first.target, first.args[1:], ndim, **dict(first.kwargs))
                found = self._call(op, "aten.permute.default", inner, (0, *(dim + 1 for dim in order)))
            self.known[key] = found or self._call(op, "aten.stack.default", tuple(values), 0)
        return self.known[key]

    def _is_written(self, value: Value) -> bool:
        """Whether the first expert writes to it."""
        body = (op for op in self.loop.bodies[0] if op.target in SCATTERS and op.inputs[0].name not in self.walk.rows)
        return any(op.inputs[0].name == value.name for op in body)

    def _scatter(self, copies: Sequence[Op]) -> None:
        """The tensor that all experts add their rows to, or write them to."""
        op = copies[0]
        chain = _chained(copies, self.graph)
        ones, coordinates = lookup(op, self.walk)
        arguments = arguments_of(op)
        source = self.now.get(op.inputs[-1].name)
        if ones or source is None or arguments.get("alpha", 1) != 1 or len(op.inputs) != 2 + len(coordinates):
            refuse(op, "what it writes is not one row for each row")
        divisor, base = self.loop.divisor(len(coordinates)), chain[0].inputs[0]
        is_sum = op.target == "aten.index_add.default" or bool(arguments["accumulate"])
        is_added = op.inputs[-1].name in self.added
        if is_sum and is_added:
            refuse(op, "rows are added twice")
        if not (is_sum or is_added) and divisor > 1:
            refuse(op, "rows of one token that several experts have overwrite one another")
        if is_added and not are_distinct(self.loop, self.walk.made):
            refuse(op, "an expert may be chosen twice for a token, of which `x[rows] += y` adds one")
        restored = self._call(op, "aten.index.Tensor", source, (self._order(op, "inverse"),))
        rest = base.shape[len(coordinates) :]
        if divisor > 1:
            each = self._call(op, "aten.reshape.default", restored, (self.loop.num_rows // divisor, divisor, *rest))
            restored = self._call(op, "aten.sum.dim_IntList", each, (1,))
        if restored.shape != base.shape:
            restored = self._call(op, "aten.reshape.default", restored, base.shape)
        if restored.dtype != base.dtype:
            restored = self._call(op, "aten.to.dtype", restored, base.dtype)
        self.results[chain[-1].outputs[0].name] = (
            self._call(op, "aten.add.Tensor", base, restored) if is_sum or is_added else restored
        )


def _chained(copies: Sequence[Op], graph: Graph) -> list[Op]:
    """Writes to one tensor, one on the other; nothing else reads what is written in between."""
    position = {op.name: number for number, op in enumerate(graph.ops)}
    chain = sorted(copies, key=lambda op: position[op.name])
    for one, following in pairwise(chain):
        readers = {use.user for use in graph.uses.get(one.outputs[0].name, ())}
        gathers = {op.name for op in graph.ops if op.name in readers and op.target == "aten.index.Tensor"}
        if following.inputs[0].name != one.outputs[0].name or readers - gathers != {following.name}:
            refuse(one, "what the experts write to is read in between, or each writes to a tensor of its own")
    return chain


def _selected_from(makers: Iterable[Op]) -> Value | None:
    """The tensor whose parts are the results of all these selects, in order."""
    makers = list(makers)
    whole = makers[0].inputs[0]
    parts = [(op.inputs[0].name, *op.args[1:]) for op in makers]
    return whole if parts == [(whole.name, 0, number) for number in range(whole.shape[0])] else None


def _are_alike(makers: Sequence[Op | None], first: Op) -> bool:
    return all(
        op is not None and (op.target, op.args, op.kwargs) == (first.target, first.args, first.kwargs) for op in makers
    )
