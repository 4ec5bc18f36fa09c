"""The pass that makes one op of a loop over steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from autopar.ir.folding.match_blocks import Source
from autopar.ir.graph import Graph, Op, Slot, Value
from autopar.ir.loops.advanced_steps import advanced, check_all_resolved, check_index
from autopar.ir.loops.body import LoopBody, named
from autopar.ir.loops.find_loops import (
    BEFORE,
    MIN_STEPS,
    OUTSIDE,
    SAME,
    SELECT,
    SLICE,
    UNBIND,
    StepLoop,
    find_loops,
    indices,
    source_of,
)
from autopar.ir.loops.join_steps import join_steps
from autopar.ir.loops.plain_slices import plain_slices
from autopar.ir.loops.scan_op import SCAN

_JOINS = {"aten.stack.default": True, "aten.cat.default": False}  # whether it adds a dim

_FEW = 4  # steps that are taken apart one by one: the gradient of each is one of all steps


def roll_up(graph: Graph) -> Graph:
    """`graph` with one `autopar.scan` in place of each loop (see `find_loops`), which computes the same in as many
    steps; what all steps give out is joined as one tensor. A loop over what another one gives out is found behind it.
    """
    if len(graph.ops) < MIN_STEPS:
        check_all_resolved(graph)
        return graph
    given, graph = graph, plain_slices(graph)
    while loops := find_loops(graph):
        graph = _Rolling(graph, loops).rolled()
    check_all_resolved(graph)
    scanned = {value.name for op in graph.ops if op.target == SCAN for value in op.outputs}
    ops = (
        part for op in graph.ops for part in (_selected(op, graph) if scanned & {v.name for v in op.inputs} else (op,))
    )
    return join_steps(replace(graph, ops=tuple(ops))) if scanned else given


def _selected(op: Op, graph: Graph) -> Sequence[Op]:
    """The op, or in place of one that takes all steps apart those that take the few that are read."""
    read = [(step, value) for step, value in enumerate(op.outputs) if value.name in graph.uses]
    if op.target != UNBIND or len(read) > _FEW:
        return (op,)
    dim = op.args[1] if len(op.args) > 1 else 0
    return [
        replace(op, name=value.name, target=SELECT, args=(Slot(0), dim, step), outputs=(value,), is_tuple=False)
        for step, value in read
    ]


@dataclass
class _StepInputs:
    """The inputs of a step while it is written: (what it reads) -> its value."""

    carried: dict[tuple[int, int], Value] = field(default_factory=dict)
    sliced: dict[tuple[Source, int, int, int], Value] = field(default_factory=dict)
    invariant: dict[Source, Value] = field(default_factory=dict)


class _Rolling:
    """A walk over the graph that writes it anew."""

    def __init__(self, graph: Graph, loops: Sequence[StepLoop]) -> None:
        self.graph, self.advanced = graph, advanced(graph, loops)
        self.names = {name for op in graph.ops for name in (op.name, *(value.name for value in op.outputs))}
        self.names |= {item.value.name for item in graph.inputs}
        self.replaced: dict[str, Value] = {}
        self.stacked: dict[str, tuple[Value, int, int]] = {}  # value of a step -> what all give out, step, steps
        self.parts: dict[str, tuple[Value, ...]] = {}  # of what all give out, that of each step
        self.makers: dict[str, Op] = {}
        self.ops: list[Op] = []

    def rolled(self) -> Graph:
        """The graph with the loops as ops."""
        first = {loop.first: loop for loop in self.advanced.loops}
        number = 0
        while number < len(self.graph.ops):
            if loop := first.get(number):
                self._add_loop(loop)
                number = loop.stop
            else:
                self._add(self.graph.ops[number])
                number += 1
        outputs = tuple(self._now(item) if isinstance(item, Value) else item for item in self.graph.outputs)
        mutations = tuple((fqn, self._now(value)) for fqn, value in self.graph.mutations)
        return replace(self.graph, ops=tuple(self.ops), outputs=outputs, mutations=mutations)

    def _value(self, source: Source) -> Value:
        made, index = source
        return self.graph.inputs[index].value if made < 0 else self.graph.ops[made].outputs[index]

    def _unique(self, stem: str) -> str:
        name = next(n for n in (stem, *(f"{stem}_{i}" for i in range(1, len(self.names) + 2))) if n not in self.names)
        self.names.add(name)
        return name

    def _call(self, like: Op, target: str, args: tuple[Any, ...], inputs: Sequence[Value], shape: Any) -> Value:
        """The result of a further op, named after the op `like`."""
        name = self._unique(like.name)
        out = replace(inputs[0], name=name, shape=tuple(shape))
        self.ops.append(replace(like, name=name, target=target, args=args, kwargs=(), inputs=tuple(inputs),
                                outputs=(out,), is_tuple=False))  # fmt: skip
        return out

    def _now(self, value: Value) -> Value:
        """The value that stands for one of the graph; that of a step is cut out of what all give out."""
        if value.name in self.stacked:
            whole, step, _ = self.stacked[value.name]
            return self._parts(whole)[step]
        return self.replaced.get(value.name, value)

    def _parts(self, whole: Value) -> tuple[Value, ...]:
        """The value of each step, of the stacked ones."""
        if whole.name not in self.parts:
            op, name = self.makers[whole.name], self._unique(f"{whole.name}_steps")
            each = tuple(
                replace(whole, name=self._unique(f"{name}_out{step}"), shape=whole.shape[1:])
                for step in range(whole.shape[0])
            )
            call = {"name": name, "target": UNBIND, "args": (Slot(0), 0), "inputs": (whole,), "outputs": each}
            self.ops.append(replace(op, **call))
            self.parts[whole.name] = each
        return self.parts[whole.name]

    def _add(self, op: Op) -> None:
        if op.name in self.advanced.resolved:
            return
        if op.target in _JOINS and not op.kwargs and any(value.name in self.stacked for value in op.inputs):
            joined = self._joined(op)
            if joined is not None:
                self.replaced[op.outputs[0].name] = joined
                return
        inputs = tuple(map(self._now, op.inputs))
        self.ops.append(op if inputs == op.inputs else replace(op, inputs=inputs))

    def _joined(self, op: Op) -> Value | None:
        """The result of `op`, in which the values of all steps stand together; None if they do not."""
        pieces = _pieces(op.inputs, self.stacked)
        if op.args[0] != tuple(map(Slot, range(len(op.inputs)))):
            return None
        adds_dim, ndim = _JOINS[op.target], len(op.outputs[0].shape)
        dim = (op.args[1] if len(op.args) > 1 else 0) % ndim
        joined = [self._piece(op, piece, dim, adds_dim) for piece in pieces]
        if len(joined) == 1:
            return joined[0]
        args = tuple(map(Slot, range(len(joined)))), dim
        return self._call(op, "aten.cat.default", args, joined, op.outputs[0].shape)

    def _piece(self, op: Op, piece: "Value | _StackedSteps", dim: int, adds_dim: bool) -> Value:
        if isinstance(piece, Value):
            now = self._now(piece)
            shape = (*now.shape[:dim], 1, *now.shape[dim:])
            return self._call(op, "aten.reshape.default", (Slot(0), shape), (now,), shape) if adds_dim else now
        whole = self._rows(op, piece.whole, piece.start, piece.stop)
        if piece.is_reversed:
            whole = self._call(op, "aten.flip.default", (Slot(0), (0,)), (whole,), whole.shape)
        order = (*range(1, dim + 1), 0, *range(dim + 1, len(whole.shape)))
        shape = tuple(whole.shape[d] for d in order)
        turned = self._call(op, "aten.permute.default", (Slot(0), order), (whole,), shape)
        if adds_dim:
            return turned
        shape = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        return self._call(op, "aten.reshape.default", (Slot(0), shape), (turned,), shape)

    def _rows(self, like: Op, whole: Value, start: int, stop: int) -> Value:
        """The stacked values of the steps from `start` to `stop`."""
        if (start, stop) == (0, whole.shape[0]):
            return whole
        shape = (stop - start, *whole.shape[1:])
        return self._call(like, "aten.slice.Tensor", (Slot(0), 0, start, stop), (whole,), shape)

    def _add_loop(self, loop: StepLoop) -> None:
        first = self.graph.ops[loop.first]
        body, reads = self._written(loop)
        given_out = self._given_out(loop, reads)
        last = {place: self._of_step(loop, place) for place in reads.carried}
        wanted = self._body(loop, body, reads, given_out)
        sources = [loop.initial[number][slot] for number, slot in _first_reads(loop, reads.carried)]
        slices = [self._slice(key, loop.steps) for key in reads.sliced]
        inputs = tuple(self._now(self._value(source)) for source in sources)
        inputs += (*(value for value, _ in slices), *(self._now(self._value(source)) for source in reads.invariant))
        name = self._unique("scan")
        outputs = tuple(
            replace(value, name=self._unique(f"{name}_out{number}"))
            for number, value in enumerate((*last.values(), *(_stacked(value, loop) for _, value in given_out)))
        )
        slots, counts = tuple(map(Slot, range(len(inputs)))), (len(sources), len(sources) + len(slices))
        args = (
            *(slots[: counts[0]], slots[counts[0] : counts[1]], slots[counts[1] :], named(wanted)),
            *(tuple(dim for _, (dim, _, _) in slices), tuple(start for _, (_, start, _) in slices)),
            *(tuple(stride for _, (_, _, stride) in slices), loop.steps),
        )
        self.ops.append(Op(name, SCAN, args, (), inputs, outputs, first.is_no_grad, first.module, first.line, True))
        self.makers.update((out.name, self.ops[-1]) for out in outputs)
        for place, out in zip(last, outputs):
            self.replaced.update(dict.fromkeys(self._names(loop, place, loop.steps - 1), out))
        for (place, _), out in zip(given_out, outputs[len(last) :]):
            for step in range(loop.steps):
                self.stacked.update(dict.fromkeys(self._names(loop, place, step), (out, step, loop.steps)))
            for name, (of_loop, at, start, stop) in self.advanced.rows.items():
                if (of_loop, at) == (loop.first, place):
                    self.replaced[name] = self._rows(self.ops[-1], out, start, stop)

    def _of_step(self, loop: StepLoop, place: tuple[int, int], step: int = 1) -> Value:
        return self.graph.ops[loop.first + step * loop.block + place[0]].outputs[place[1]]

    def _names(self, loop: StepLoop, place: tuple[int, int], step: int) -> list[str]:
        """The names of a value of a step: several of one that was not traced, or none, if nothing reads it."""
        known = self.advanced.names.get((loop.first, place, step), [])
        return [self._of_step(loop, place, step).name, *known] if step < loop.num_traced else known

    def _slice(self, key: tuple[Source, int, int, int], steps: int) -> tuple[Value, tuple[int, int, int]]:
        """(the tensor that is sliced, (dim, index in the first step, stride))."""
        (made, index), dim, start, stride = key
        if made >= 0 and self.graph.ops[made].target == UNBIND and dim < 0:
            op = self.graph.ops[made]
            value, dim = op.inputs[0], op.args[1] if len(op.args) > 1 else 0
        else:
            value = self._value((made, index))
        check_index(start, stride, steps, value.shape[dim])
        return self._now(value), (dim % len(value.shape), start, stride)

    def _written(self, loop: StepLoop) -> tuple[list[Op], _StepInputs]:
        """The ops of the second step with values of their own, and what they read."""
        reads, made, ops = _StepInputs(), dict[tuple[int, int], Value](), list[Op]()
        slices = {(number, slot): rest for number, slot, *rest in indices(loop)}
        for number, places in enumerate(loop.places):
            op = self.graph.ops[loop.first + loop.block + number]
            inputs = []
            for slot, (value, (kind, at, index)) in enumerate(zip(op.inputs, places)):
                if kind == SAME:
                    inputs.append(made[at, index])
                elif kind == BEFORE:
                    inputs.append(_known(reads.carried, (at, index), value, "carried"))
                elif kind == OUTSIDE:
                    inputs.append(_known(reads.invariant, source_of((kind, at, index)), value, "same"))
                else:
                    source, start, stride = slices[number, slot]
                    dim = op.args[1] % len(value.shape) if op.target == SELECT else -1
                    inputs.append(_known(reads.sliced, (source, dim, start, stride), op.outputs[0]
                                         if dim >= 0 else value, "slice"))  # fmt: skip
            if places and places[0][0] == SLICE and op.target == SELECT:
                made[number, 0] = inputs[0]
                continue
            outputs = tuple(replace(value, name=f"v{number}_{i}") for i, value in enumerate(op.outputs))
            made.update(((number, i), value) for i, value in enumerate(outputs))
            ops.append(replace(op, name=f"op{number}", inputs=tuple(inputs), outputs=outputs, module="", line=""))
        self.made = made
        return ops, reads

    def _body(
        self, loop: StepLoop, ops: Sequence[Op], reads: _StepInputs, given_out: Sequence[tuple[tuple[int, int], Value]]
    ) -> LoopBody:
        outputs = (*(self.made[place] for place in reads.carried), *(self.made[place] for place, _ in given_out))
        wanted, kept = {value.name for value in outputs}, list[Op]()
        for op in reversed(ops):
            if any(value.name in wanted for value in op.outputs):
                kept.append(op)
                wanted.update(value.name for value in op.inputs)
        inputs = (*reads.carried.values(), *reads.sliced.values(), *reads.invariant.values())
        return LoopBody(inputs, tuple(reversed(kept)), outputs, len(reads.carried), len(reads.sliced))

    def _given_out(self, loop: StepLoop, reads: _StepInputs) -> list[tuple[tuple[int, int], Value]]:
        """(place in a step, value) of all that is read outside of the loop, but for what the last step carries on."""
        inside = {op.name for op in self.graph.ops[loop.first : loop.stop]} | self.advanced.resolved
        found = []
        for number in range(loop.block):
            for index in range(len(self.graph.ops[loop.first + number].outputs)):
                steps = {
                    step
                    for step in range(loop.steps)
                    for name in self._names(loop, (number, index), step)
                    for use in self.graph.uses.get(name, ())
                    if use.user not in inside
                }
                is_whole = any(rows[:2] == (loop.first, (number, index)) for rows in self.advanced.rows.values())
                if is_whole or steps - ({loop.steps - 1} if (number, index) in reads.carried else set()):
                    found.append(((number, index), self._of_step(loop, (number, index))))
        return found


@dataclass(frozen=True)
class _StackedSteps:
    """The stacked values of all steps, where an op reads that of each step from `start` to `stop` in turn."""

    whole: Value
    start: int
    stop: int
    is_reversed: bool


def _known(known: dict[Any, Value], key: Any, value: Value, stem: str) -> Value:
    return known.setdefault(key, replace(value, name=f"{stem}{len(known)}"))


def _stacked(value: Value, loop: StepLoop) -> Value:
    return replace(value, shape=(loop.steps, *value.shape))


def _first_reads(loop: StepLoop, carried: Mapping[tuple[int, int], Value]) -> list[tuple[int, int]]:
    """For each carried value, (op, input) that reads it."""
    reads: dict[tuple[int, int], tuple[int, int]] = {}
    for number, places in enumerate(loop.places):
        for slot, (kind, made, index) in enumerate(places):
            if kind == BEFORE:
                reads.setdefault((made, index), (number, slot))
    return [reads[place] for place in carried]


def _pieces(values: Sequence[Value], stacked: Mapping[str, tuple[Value, int, int]]) -> list[Value | _StackedSteps]:
    """`values` with those of several steps of a loop in a row together."""
    runs: list[list[Value]] = []
    for value in values:
        if runs and _goes_on([stacked.get(each.name) for each in (*runs[-1][-2:], value)]):
            runs[-1].append(value)
        else:
            runs.append([value])
    pieces: list[Value | _StackedSteps] = []
    for run in runs:
        if len(run) == 1:
            pieces.append(run[0])
            continue
        (whole, first, _), (_, last, _) = stacked[run[0].name], stacked[run[-1].name]
        pieces.append(_StackedSteps(whole, min(first, last), max(first, last) + 1, first > last))
    return pieces


def _goes_on(places: Sequence[tuple[Value, int, int] | None]) -> bool:
    """Whether the last of two or three values is that of the next step, in the same direction as those before."""
    known = [place for place in places if place is not None]
    strides = [b[1] - a[1] for a, b in pairwise(known)]
    is_one = len(known) == len(places) and all(place[0] is known[0][0] for place in known)
    return is_one and strides[-1] in (1, -1) and len(set(strides)) == 1
