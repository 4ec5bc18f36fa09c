"""A graph with few copies of each repeat: as many as it takes to see every way in which a value is used."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.folding.fold import Folded, Repeat, value_classes
from autopar.ir.graph import Graph, Op
from autopar.sbp.analysis.read_slots import read_slots
from autopar.sbp.assignment import INPUT, KEPT, OP, OUTPUT, Assignment, Names, names_of
from autopar.sbp.microbatch.microbatch_graph import Microbatched

# The first copy reads values from before the repeat, ops behind the repeat read the last; the second represents all
# between.
_NUM_KEPT = 3


@dataclass(frozen=True)
class Short:
    """`graph` lacks all but the first, second and last copy of each repeat; the names are those of the `whole` graph.

    counts: op of a repeat that lacks copies -> how many ops of the whole it stands for. names, classes: those of the
    whole, as `Assignment.expanded` takes them.
    """

    whole: Graph
    graph: Graph
    folded: Folded
    counts: Mapping[str, int]
    names: Names
    classes: Mapping[str, Mapping[str, str]]

    def expand(self, assignment: Assignment) -> Assignment:
        """The assignment of the whole graph that gives every member of a class what the class has in `graph`."""
        return assignment.expanded(self.names, self.classes)


def classes_of(graph: Graph, folded: Folded) -> dict[str, Mapping[str, str]]:
    """OP, INPUT, KEPT or OUTPUT -> name -> the member of its class that stands for it."""
    values = value_classes(graph, folded)
    return {OP: folded.representative, INPUT: values, KEPT: values, OUTPUT: values}


def shorten(graph: Graph, folded: Folded) -> Short:
    """Drop the copies that are like the second.

    Repeats from which other ops read or whose copies are outputs stay as they are.
    """
    long = droppable(graph, folded.repeats, _NUM_KEPT)
    counts: dict[str, int] = {}
    for repeat in long:
        counts |= _counts(graph, repeat)
    short = drop_copies(graph, long, [_NUM_KEPT] * len(long))
    return Short(graph, short, folded, counts, graph.once(names_of), classes_of(graph, folded))


def fold_microbatch(folded: Folded, micro: Microbatched) -> Folded:
    """`folded`, of the whole batch's graph or of some of its copies, for the graph of a microbatch.

    What is added for ops of one class is of one class; what has other shapes now is of another. A repeat whose copies
    differ is dropped.
    """
    graph, first = micro.graph, {}

    def class_of(name: str, *facts: Hashable) -> str:
        origin = name if name in folded.representative else micro.added.get(name, name)
        return first.setdefault((folded.representative.get(origin, origin), facts), name)

    nth: Counter[str] = Counter()  # of what is added for an op
    same = {}
    for op in graph.ops:
        number = -1
        if op.name not in folded.representative:
            origin = micro.added.get(op.name, op.name)
            number, nth[origin] = nth[origin], nth[origin] + 1
        same[op.name] = class_of(op.name, op.target, number, tuple(value.shape for value in (*op.inputs, *op.outputs)))
    same |= {item.value.name: class_of(item.value.name, item.kind, item.value.shape) for item in graph.inputs}
    return Folded(same, tuple(_repeats(folded, micro, same)))


def _repeats(folded: Folded, micro: Microbatched, same: Mapping[str, str]) -> Iterator[Repeat]:
    """The repeats whose copies are still of one class in the microbatch, with the added ops."""
    classes = [same[op.name] for op in micro.graph.ops]
    position = micro.graph.position
    for repeat in folded.repeats:
        own = set(repeat.ops)
        block = tuple(op.name for op in micro.graph.ops if micro.added.get(op.name, op.name) in own)
        first, length = position[block[0]], len(block) * repeat.count
        if classes[first : first + length] == [same[name] for name in block] * repeat.count:
            yield Repeat(block, repeat.count)


def droppable(graph: Graph, repeats: Iterable[Repeat], num_kept: int) -> tuple[Repeat, ...]:
    """The repeats with more than `num_kept` copies in which only a copy itself and the next read its values."""
    return tuple(
        repeat
        for repeat in repeats
        if repeat.count > num_kept and is_used_in_turn(graph, _dropped(graph, repeat, num_kept), len(repeat.ops))
    )


def drop_copies(graph: Graph, repeats: Iterable[Repeat], num_kept: Iterable[int]) -> Graph:
    """`graph` with the last copy of each repeat, which is `droppable`, and as
    many before it, from the first, as makes `num_kept`.
    """
    pairs = sorted(
        (_dropped(graph, repeat, num), len(repeat.ops)) for repeat, num in zip(repeats, num_kept, strict=True)
    )
    return _without(graph, [(span, block) for span, block in pairs if span[0] < span[1]])


def is_used_in_turn(graph: Graph, span: tuple[int, int], block: int) -> bool:
    """Whether only its own copy and the next read what a copy makes, of the copies of `block` ops in [start, stop)."""
    (start, stop), slots = span, graph.once(read_slots)
    if slots.is_result[start:stop].any():
        return False
    within = (slots.maker >= start) & (slots.maker < stop)
    return bool(((slots.user[within] - start) // block - (slots.maker[within] - start) // block <= 1).all())


def _dropped(graph: Graph, repeat: Repeat, num_kept: int) -> tuple[int, int]:
    """[start, stop) of the ops of the copies between the first num_kept - 1 and the last."""
    first, block = graph.position[repeat.ops[0]], len(repeat.ops)
    return first + (num_kept - 1) * block, first + max(repeat.count - 1, num_kept - 1) * block


def _counts(graph: Graph, repeat: Repeat) -> dict[str, int]:
    start, block = graph.position[repeat.ops[0]], len(repeat.ops)
    copies = {0: 1, 1: repeat.count - 2, repeat.count - 1: 1}
    return {
        op.name: count
        for copy, count in copies.items()
        for op in graph.ops[start + copy * block : start + (copy + 1) * block]
    }


def _without(graph: Graph, dropped: Sequence[tuple[tuple[int, int], int]]) -> Graph:
    """`graph` without the ops of these spans of copies, in order; what read the last of them reads the copy before.

    dropped: [start, stop) of each, and the number of ops of its copies. Inputs that only they read are dropped too.
    """
    slots, kept, end = graph.once(read_slots), list[int](), 0
    like = np.arange(
        len(graph.ops)
    )  # each op or, if it is dropped, its counterpart in the copy before all dropped ones
    for (start, stop), block in dropped:
        kept += range(end, start)
        like[start:stop] = start - block + np.arange(stop - start) % block
        end = stop
    kept += range(end, len(graph.ops))
    is_kept = np.zeros(len(graph.ops), dtype=bool)
    is_kept[kept] = True
    of_input, reads = slots.maker < 0, is_kept[slots.user]
    is_read = np.zeros((2, len(graph.inputs)), dtype=bool)  # by what is dropped, by what is kept
    for number, those in enumerate((~reads, reads)):
        is_read[number, slots.index[of_input & those]] = True
    is_unread = is_read[0] & ~is_read[1] & ~slots.is_returned
    moved = set(slots.user[reads & ~of_input & ~is_kept[slots.maker]].tolist())
    ops = tuple(_reading(graph, number, like) if number in moved else graph.ops[number] for number in kept)
    return replace(graph, ops=ops, inputs=tuple(x for x, is_gone in zip(graph.inputs, is_unread) if not is_gone))


def _reading(graph: Graph, number: int, like: np.ndarray) -> Op:
    """Op `number` with the values in its slots that the op's `like` makes."""
    slots, op = graph.once(read_slots), graph.ops[number]
    span = slice(slots.first[number], slots.first[number + 1])
    makers, indices = slots.maker[span].tolist(), slots.index[span].tolist()
    inputs = tuple(
        value if maker < 0 or like[maker] == maker else graph.ops[like[maker]].outputs[index]
        for value, maker, index in zip(op.inputs, makers, indices)
    )
    return replace(op, inputs=inputs)
