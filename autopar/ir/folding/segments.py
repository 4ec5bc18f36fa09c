"""Segments: consecutive copies of a repeat that are planned alike, each segment apart from the others."""

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.graph import Graph

# For each repeat of a Folded, the numbers of consecutive copies that form a segment.
Segments = tuple[tuple[int, ...], ...]
# The (repeat, segment) pairs that an op or input belongs to.
Places = frozenset[tuple[int, int]]


def ends_apart(folded: Folded) -> Segments:
    """The usual segments of each repeat: the first copy, the interior copies, the last copy.

    >>> from autopar.ir.folding.fold import Repeat
    >>> ends_apart(Folded({}, (Repeat(("a",), 2), Repeat(("b",), 32))))
    ((1, 1), (1, 30, 1))
    """
    return tuple((1, 1) if repeat.count == 2 else (1, repeat.count - 2, 1) for repeat in folded.repeats)


def segmented(folded: Folded, graph: Graph, segments: Segments) -> Folded:
    """`folded` with the copies of each repeat split into consecutive segments that are classes of their own.

    `segments`: one tuple of positive sizes for each repeat, summing to its count; (count,) leaves a repeat unchanged. A
    class is represented by its member in the first copy of the segment; an input that all copies read stays one class.
    ValueError for sizes that do not sum to the count.
    """
    _check(folded, segments)
    copies = copies_of(folded, graph)
    segment_of = [[i for i, size in enumerate(sizes) for _ in range(size)] for sizes in segments]
    first: dict[tuple[str, Places], str] = {}
    classes: dict[str, tuple[str, Places]] = {}
    for name, pairs in sorted(copies.items(), key=lambda item: min(item[1])):
        places = frozenset((repeat, segment_of[repeat][copy]) for repeat, copy in pairs)
        classes[name] = folded.representative[name], places
        first.setdefault(classes[name], name)
    representative = {
        name: first[classes[name]] if name in classes else same for name, same in folded.representative.items()
    }
    return Folded(representative, _repeats(folded, graph, segments))


def _check(folded: Folded, segments: Segments) -> None:
    counts = [repeat.count for repeat in folded.repeats]
    if [sum(sizes) for sizes in segments] != counts or any(size < 1 for sizes in segments for size in sizes):
        raise ValueError(f"segments of repeats: expected positive sizes that sum to {counts}, found {segments}")


def copies_of(folded: Folded, graph: Graph) -> dict[str, set[tuple[int, int]]]:
    """Name of each op and input that has a class of several members -> the (repeat, copy) pairs it belongs to.

    An input belongs to all copies that read it, even where another of its readers gives it its class; that only makes
    finer classes.
    """
    position = {op.name: i for i, op in enumerate(graph.ops)}
    inputs = {item.value.name for item in graph.inputs}
    repeated = {same for name, same in folded.representative.items() if name != same}
    copies: dict[str, set[tuple[int, int]]] = {}
    for number, repeat in enumerate(folded.repeats):
        first, block = position[repeat.ops[0]], len(repeat.ops)
        for i, op in enumerate(graph.ops[first : first + block * repeat.count]):
            repeated_inputs = [
                value.name
                for value in op.inputs
                if value.name in inputs and folded.representative[value.name] in repeated
            ]
            for name in (op.name, *repeated_inputs):
                copies.setdefault(name, set()).add((number, i // block))
    return copies


def _repeats(folded: Folded, graph: Graph, segments: Segments) -> tuple[Repeat, ...]:
    """A Repeat for each segment of more than one copy."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    repeats = []
    for repeat, sizes in zip(folded.repeats, segments):
        start, block = position[repeat.ops[0]], len(repeat.ops)
        for size in sizes:
            if size > 1:
                repeats.append(Repeat(tuple(op.name for op in graph.ops[start : start + block]), size))
            start += size * block
    return tuple(repeats)
