"""A graph with few copies of each repeat: as many as it takes to see every way in which a value is used."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir.folding.fold import Folded, Repeat, value_classes
from autopar.ir.graph import Graph, Op, Value
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
    uses = graph.uses
    position = {op.name: number for number, op in enumerate(graph.ops)}
    dropped: dict[str, Op] = {}  # op -> its counterpart in the second copy
    counts: dict[str, int] = {}
    for repeat in folded.repeats:
        shorter = _dropped(graph, repeat, position, _NUM_KEPT)
        if _is_used_in_turn(graph, repeat, shorter, uses, position):
            dropped |= shorter
            counts |= _counts(graph, repeat, position)
    return Short(graph, _without(graph, dropped), folded, counts, names_of(graph), classes_of(graph, folded))


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
    position = {op.name: number for number, op in enumerate(micro.graph.ops)}
    for repeat in folded.repeats:
        own = set(repeat.ops)
        block = tuple(op.name for op in micro.graph.ops if micro.added.get(op.name, op.name) in own)
        first, length = position[block[0]], len(block) * repeat.count
        if classes[first : first + length] == [same[name] for name in block] * repeat.count:
            yield Repeat(block, repeat.count)


def droppable(graph: Graph, repeats: Iterable[Repeat], num_kept: int) -> tuple[Repeat, ...]:
    """The repeats with more than `num_kept` copies in which only a copy itself and the next read its values."""
    uses, position = graph.uses, {op.name: number for number, op in enumerate(graph.ops)}
    dropped = ((repeat, _dropped(graph, repeat, position, num_kept)) for repeat in repeats)
    return tuple(repeat for repeat, ops in dropped if _is_used_in_turn(graph, repeat, ops, uses, position))


def drop_copies(graph: Graph, repeats: Iterable[Repeat], num_kept: Iterable[int]) -> Graph:
    """`graph` with the last copy of each repeat, which is `droppable`, and as
    many before it, from the first, as makes `num_kept`.
    """
    position = {op.name: number for number, op in enumerate(graph.ops)}
    dropped: dict[str, Op] = {}
    for repeat, num in zip(repeats, num_kept, strict=True):
        dropped |= _dropped(graph, repeat, position, num)
    return _without(graph, dropped)


def _dropped(graph: Graph, repeat: Repeat, position: Mapping[str, int], num_kept: int) -> dict[str, Op]:
    """The ops of the copies between the first num_kept - 1 and the last -> their like in the last of those."""
    if repeat.count <= num_kept:
        return {}
    block = len(repeat.ops)
    like = position[repeat.ops[0]] + (num_kept - 2) * block
    between = graph.ops[like + block : like + (repeat.count - num_kept + 1) * block]
    return {op.name: graph.ops[like + number % block] for number, op in enumerate(between)}


def _counts(graph: Graph, repeat: Repeat, position: Mapping[str, int]) -> dict[str, int]:
    start, block = position[repeat.ops[0]], len(repeat.ops)
    copies = {0: 1, 1: repeat.count - 2, repeat.count - 1: 1}
    return {
        op.name: count
        for copy, count in copies.items()
        for op in graph.ops[start + copy * block : start + (copy + 1) * block]
    }


def _is_used_in_turn(
    graph: Graph, repeat: Repeat, dropped: Mapping[str, Op], uses: Mapping[str, tuple], position: Mapping[str, int]
) -> bool:
    """Whether only its own copy and the next read what a dropped copy makes."""
    if not dropped:
        return False
    start, block = position[repeat.ops[0]], len(repeat.ops)

    def copy_of(name: str) -> int:
        return (position[name] - start) // block if name in position else -1

    names = [(value.name, copy_of(name)) for name in dropped for value in graph.ops[position[name]].outputs]
    return all(copy_of(use.user) - copy in (0, 1) for name, copy in names for use in uses.get(name, ()))


def _without(graph: Graph, dropped: Mapping[str, Op]) -> Graph:
    like: dict[str, Value] = {}
    for op in graph.ops:
        if op.name in dropped:
            like.update((value.name, same) for value, same in zip(op.outputs, dropped[op.name].outputs))
    ops = tuple(_reading(op, like) for op in graph.ops if op.name not in dropped)
    unread = {value.name for op in graph.ops if op.name in dropped for value in op.inputs}
    unread -= {value.name for op in ops for value in op.inputs}
    return replace(graph, ops=ops, inputs=tuple(item for item in graph.inputs if item.value.name not in unread))


def _reading(op: Op, like: Mapping[str, Value]) -> Op:
    if not any(value.name in like for value in op.inputs):
        return op
    return replace(op, inputs=tuple(like.get(value.name, value) for value in op.inputs))
