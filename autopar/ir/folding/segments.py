"""Segments: consecutive copies of a repeat that are planned alike, each segment apart from the others."""

from collections.abc import Hashable

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.graph import Graph

# For each repeat of a Folded, the numbers of consecutive copies that form a segment.
Segments = tuple[tuple[int, ...], ...]


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
    segment_of = [[i for i, size in enumerate(sizes) for _ in range(size)] for sizes in segments]
    first: dict[Hashable, str] = {}
    representative = dict(folded.representative)
    for number, (repeat, of_copy) in enumerate(zip(folded.repeats, segment_of)):
        start = graph.position[repeat.ops[0]]
        names = [op.name for op in graph.ops[start : start + len(repeat.ops) * repeat.count]]
        places = [(number, segment) for segment in of_copy for _ in repeat.ops]
        for name, place in zip(names, places):
            representative[name] = first.setdefault((folded.representative[name], place), name)
    for name, pairs in sorted(_inputs_of(folded, graph).items(), key=lambda item: min(item[1])):
        of_input = frozenset((repeat, segment_of[repeat][copy]) for repeat, copy in pairs)
        representative[name] = first.setdefault((folded.representative[name], of_input), name)
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
    copies = _inputs_of(folded, graph)
    for number, repeat in enumerate(folded.repeats):
        first, block = graph.position[repeat.ops[0]], len(repeat.ops)
        for i, op in enumerate(graph.ops[first : first + block * repeat.count]):
            copies[op.name] = {(number, i // block)}
    return copies


def _inputs_of(folded: Folded, graph: Graph) -> dict[str, set[tuple[int, int]]]:
    """Name of each input that has a class of several members -> the (repeat, copy) pairs that read it."""
    names = [item.value.name for item in graph.inputs]
    repeated = {folded.representative[name] for name in names if folded.representative[name] != name}
    copy_of: dict[int, tuple[int, int]] = {}  # of an op, by its position
    for number, repeat in enumerate(folded.repeats):
        first, block = graph.position[repeat.ops[0]], len(repeat.ops)
        copy_of |= {first + i: (number, i // block) for i in range(block * repeat.count)}
    copies: dict[str, set[tuple[int, int]]] = {}
    for name in (name for name in names if folded.representative[name] in repeated):
        readers = (graph.position.get(use.user, -1) for use in graph.uses.get(name, ()))
        if pairs := {copy_of[at] for at in readers if at in copy_of}:
            copies[name] = pairs
    return copies


def _repeats(folded: Folded, graph: Graph, segments: Segments) -> tuple[Repeat, ...]:
    """A Repeat for each segment of more than one copy."""
    repeats = []
    for repeat, sizes in zip(folded.repeats, segments):
        start, block = graph.position[repeat.ops[0]], len(repeat.ops)
        for size in sizes:
            if size > 1:
                repeats.append(Repeat(tuple(op.name for op in graph.ops[start : start + block]), size))
            start += size * block
    return tuple(repeats)
