"""Finds the loops over steps in a graph: runs of ops in which each step reads what the step before computed, slices of
tensors at the index of the step, and values that are the same in all steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.folding.match_blocks import Source, Wiring, wire
from autopar.ir.folding.periods import PeriodicRun, find_runs
from autopar.ir.function_ops import is_function
from autopar.ir.graph import Graph, Op
from autopar.ir.loops.advance_op import ADVANCE
from autopar.ir.op_facts import is_random

# Shorter loops stay written out: their steps may be split in ways that need communication within a step, and layers
# that share their parameters (ALBERT, up to 24) are no loop over time.
MIN_STEPS = 32
SELECT, UNBIND = "aten.select.int", "aten.unbind.int"

SAME, BEFORE, OUTSIDE, SLICE, INDEX = "same", "before", "outside", "slice", "index"
# (kind, op or input, output): of a step's own op, of the step before, or of a producer outside of the loop; a slice has
# the index in place of the output. Behind the place of what a step selects from itself is the index.
Place = tuple[str, int, int]


@dataclass(frozen=True)
class StepLoop:
    """`steps` copies of `block` ops from op `first` on, of which the first `num_traced` are in the graph.

    places: for each op of a step but the first, where each of its inputs is from. stride: by how much the index of each
    slice, by the place in the first step, changes from step to step.
    """

    first: int
    block: int
    steps: int
    places: tuple[tuple[Place, ...], ...]
    initial: tuple[tuple[Source, ...], ...]  # the sources of the first step
    strides: dict[tuple[int, int], int]  # (op of a step, input) -> stride
    num_traced: int

    @property
    def stop(self) -> int:
        return self.first + self.block * self.num_traced


def find_loops(graph: Graph) -> list[StepLoop]:
    """The loops of at least `MIN_STEPS` steps, in order, none within another."""
    kinds, read = _kinds(graph), {item.value.name for item in graph.inputs}
    found: list[StepLoop] = []
    for run in find_runs(kinds):
        if (run.stop - run.start) // run.period < MIN_STEPS or any(
            run.start < loop.stop and loop.first < run.stop for loop in found
        ):
            continue
        if _are_layers(graph.ops[run.start : run.stop], run.period, read):
            continue
        loop = _loop_in(graph, graph.once(wire), run)
        if loop is not None:
            found.append(loop)
    return sorted(found, key=lambda loop: loop.first)


def _are_layers(ops: Sequence[Op], period: int, inputs: set[str]) -> bool:
    """Whether in each `period` of `ops` one reads an input of the graph where the next one of its kind reads another
    (`_reads_other_inputs`): then no step begins anywhere.
    """
    before = -1
    for at, (op, later) in enumerate(zip(ops, ops[period:])):
        if op.target != SELECT and any(
            value.name in inputs and value.name != other.name for value, other in zip(op.inputs, later.inputs)
        ):
            if at - before > period:
                return False
            before = at
    return len(ops) - period - before <= period


def _kinds(graph: Graph) -> np.ndarray:
    """i64[ops]: a number for each op, equal for ops that differ only in producers and in the index of a slice."""
    known: dict[Any, int] = {}
    texts: dict[tuple[str, int, int], str] = {}  # of calls with the same objects, as copies of a block mostly are
    for op in graph.ops:
        key = op.target, id(op.args), id(op.kwargs)
        if key not in texts:
            texts[key] = repr((op.args[:2] if op.target == SELECT and not op.kwargs else op.args, op.kwargs))
    kinds = (_kind(op, texts[op.target, id(op.args), id(op.kwargs)]) for op in graph.ops)
    return np.array([known.setdefault(kind, len(known)) for kind in kinds], dtype=np.int64)


def _kind(op: Op, arguments: str) -> Any:
    values = tuple([(value.shape, value.dtype, value.needs_grad) for value in (*op.inputs, *op.outputs)])
    return op.target, arguments, op.is_no_grad, op.is_tuple, len(op.inputs), values


def _loop_in(graph: Graph, wiring: Wiring, run: PeriodicRun) -> StepLoop | None:
    """The longest loop within the run, of the few places where a step may begin that carry the fewest values."""
    ops = graph.ops[run.start : run.start + run.period]
    if any(map(_stays, ops)) or len({op.is_no_grad for op in ops}) > 1:
        return None
    starts = range(run.start, run.start + min(run.period, run.stop - run.start - run.period))
    if graph.once(_is_cut_short):  # where the trace of a loop ends, so does a step
        starts = range(run.start + (run.stop - run.start) % run.period, run.stop)[:1]
    best: StepLoop | None = None
    for first in sorted(starts, key=lambda first: (wiring.num_alive[first + run.period], first))[:8]:
        loop = _steps_from(graph, wiring, first, run.period, (run.stop - first) // run.period)
        if loop is not None and (best is None or loop.steps > best.steps):
            best = loop
    return best


def _is_cut_short(graph: Graph) -> bool:
    return any(op.target == ADVANCE for op in graph.ops)


def _stays(op: Op) -> bool:
    """Whether steps with this op stay written out: it draws random numbers, is not torch's, or joins samples, as a
    loss does, so that a loop of it would be whole on each rank.
    """
    joins = "batch_norm" in op.target or (len(op.outputs) == 1 and not op.outputs[0].shape and op.outputs[0].needs_grad)
    return not op.target.startswith("aten.") or is_random(op) or is_function(op) or joins


def _steps_from(graph: Graph, wiring: Wiring, start: int, block: int, count: int) -> StepLoop | None:
    best: StepLoop | None = None
    at = 0
    while count - at > max(MIN_STEPS - 1, 0 if best is None else best.steps):
        loop, at = _longest_at(graph, wiring, start, block, at, count)
        if loop is not None and loop.steps >= MIN_STEPS and (best is None or loop.steps > best.steps):
            best = loop
    return best


def _longest_at(
    graph: Graph, wiring: Wiring, start: int, block: int, at: int, count: int
) -> tuple[StepLoop | None, int]:
    """(the loop of which copy `at` is the first step, the copy that no longer belongs to it)."""
    first = start + at * block
    if _reads_other_inputs(graph, wiring, first + block, block):
        return None, at + 1
    steady = _places(graph, wiring, first, first + block, block)
    if steady is None or not _begins(graph, wiring, first, steady):
        return None, at + 1
    later = _places(graph, wiring, first, first + 2 * block, block)
    strides = _strides(steady, later)
    if strides is None:
        return None, at + 1
    steps = 2
    while at + steps < count:
        places = _places(graph, wiring, first, first + steps * block, block)
        if places is None or not _continues(steady, places, strides, steps - 1):
            break
        steps += 1
    if not _first_slices(graph, wiring, first, steady, strides):
        return None, at + 1
    initial = tuple(wiring.sources[first : first + block])
    return StepLoop(first, block, steps, steady, initial, strides, steps), at + steps


def _reads_other_inputs(graph: Graph, wiring: Wiring, start: int, block: int) -> bool:
    """Whether the step at op `start` reads an input of the graph where the step behind it reads another, as layers do
    that have parameters of their own.
    """
    return any(
        source[0] < 0 and source != later and graph.ops[number].target != SELECT
        for number in range(start, start + block)
        for source, later in zip(wiring.sources[number], wiring.sources[number + block])
    )


def _places(graph: Graph, wiring: Wiring, first: int, start: int, block: int) -> tuple[tuple[Place, ...], ...] | None:
    """For each op of the step that starts at op `start` the places of its inputs; None if it reads an older step."""
    found = []
    for number in range(start, start + block):
        op, places = graph.ops[number], []
        for made, index in wiring.sources[number]:
            if made >= first:
                if made < start - block:
                    return None
                is_own = made >= start
                places.append((SAME, made - start, index) if is_own else (BEFORE, made - start + block, index))
                places += [(INDEX, op.args[2], 0)] if op.target == SELECT and not op.kwargs else []
            elif op.target == SELECT and not op.kwargs:
                places.append((SLICE, _key(made, index), op.args[2]))
            elif made >= 0 and graph.ops[made].target == UNBIND:
                places.append((SLICE, _key(made, 0), index))
            else:
                places.append((OUTSIDE, _key(made, index), 0))
        found.append(tuple(places))
    return tuple(found)


_MANY = 2**20  # more than an op has outputs, or a graph inputs


def _key(made: int, index: int) -> int:
    """A number for a source outside of a loop."""
    return made * _MANY + index


def source_of(place: Place) -> Source:
    """The source of a place outside of a loop."""
    made, index = divmod(place[1], _MANY)
    return made, index


def _begins(graph: Graph, wiring: Wiring, first: int, steady: Sequence[Sequence[Place]]) -> bool:
    """Whether the first step reads, in place of what the step before computed, one value each from outside."""
    initial: dict[tuple[int, int], Source] = {}
    for number, places in enumerate(steady):
        if places[1:] and places[1][0] == INDEX and graph.ops[first + number].args[2] != places[1][1]:
            return False
        for (kind, made, index), source in zip(places, wiring.sources[first + number]):
            if kind == SAME and source != (first + made, index):
                return False
            if kind == OUTSIDE and source != source_of((kind, made, index)):
                return False
            if kind == BEFORE and (source[0] >= first or initial.setdefault((made, index), source) != source):
                return False
    return True


def _strides(
    steady: Sequence[Sequence[Place]], later: Sequence[Sequence[Place]] | None
) -> dict[tuple[int, int], int] | None:
    if later is None:
        return None
    return {
        (number, slot): now[2] - place[2]
        for number, (places, following) in enumerate(zip(steady, later))
        for slot, (place, now) in enumerate(zip(places, following))
        if place[0] == SLICE and now[0] == SLICE
    }


def _continues(
    steady: Sequence[Sequence[Place]],
    places: Sequence[Sequence[Place]],
    strides: dict[tuple[int, int], int],
    distance: int,
) -> bool:
    """Whether a step `distance` steps behind the second reads what that one reads, of its own step."""
    for number, (before, now) in enumerate(zip(steady, places)):
        for slot, (one, other) in enumerate(zip(before, now)):
            moved = strides.get((number, slot), 0) * distance if one[0] == SLICE else 0
            if other != (one[0], one[1], one[2] + moved):
                return False
    return True


def _first_slices(
    graph: Graph, wiring: Wiring, first: int, steady: Sequence[Sequence[Place]], strides: dict[tuple[int, int], int]
) -> bool:
    """Whether the slices of the first step are those before the second's."""
    own = _places(graph, wiring, first, first, len(steady))
    assert own is not None, "a first step has no older one"
    return all(
        one[0] != SLICE or other == (SLICE, one[1], one[2] - strides[number, slot])
        for number, (places, before) in enumerate(zip(steady, own))
        for slot, (one, other) in enumerate(zip(places, before))
    )


def indices(loop: StepLoop) -> Iterator[tuple[int, int, Source, int, int]]:
    """(op of a step, input, source, index in the first step, stride) of each slice."""
    for number, places in enumerate(loop.places):
        for slot, place in enumerate(places):
            if place[0] == SLICE:
                stride = loop.strides[number, slot]
                yield number, slot, source_of(place), place[2] - stride, stride
