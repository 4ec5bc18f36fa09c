"""Dataflow of a graph by positions, and the test whether consecutive blocks of ops have the same dataflow."""

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph

# (op index, output index) of a value made by an op; an input of the graph is (-1, index of the input).
Source = tuple[int, int]


@dataclass(frozen=True)
class Wiring:
    """The dataflow of a graph: for each op the sources of its inputs and whether it reads a parameter matrix.

    `num_alive`: number of live values just before each op, and after the last.
    """

    sources: tuple[tuple[Source, ...], ...]
    is_product: tuple[bool, ...]
    num_alive: tuple[int, ...]


def wire(graph: Graph) -> Wiring:
    """The `Wiring` of `graph`; its `num_alive` has one entry more than there are ops."""
    where: dict[str, Source] = {item.value.name: (-1, i) for i, item in enumerate(graph.inputs)}
    for i, op in enumerate(graph.ops):
        for j, value in enumerate(op.outputs):
            where[value.name] = i, j
    sources = tuple([tuple([where[value.name] for value in op.inputs]) for op in graph.ops])
    inputs = {(-1, i): item for i, item in enumerate(graph.inputs)}
    matrices = {at for at, item in inputs.items() if item.kind == "parameter" and len(item.value.shape) >= 2}
    is_product = tuple([not matrices.isdisjoint(read) for read in sources])
    return Wiring(sources, is_product, _num_alive(sources))


def _num_alive(sources: Sequence[Sequence[Source]]) -> tuple[int, ...]:
    last_use: dict[Source, int] = {}
    for i, inputs in enumerate(sources):
        for source in inputs:
            if source[0] >= 0:
                last_use[source] = i
    change = [0] * (len(sources) + 2)
    for (made, _), used in last_use.items():
        change[made + 1] += 1
        change[used + 1] -= 1
    alive = [0]
    for delta in change[1:-1]:
        alive.append(alive[-1] + delta)
    return tuple(alive)


def match_blocks(
    graph: Graph, wiring: Wiring, first: int, block: int, count: int
) -> tuple[int, int, dict[str, str]] | None:
    """(first op, copies, classes) of the longest run of copies with the same dataflow; None if it is shorter than two.

    The candidates are `count` copies of `block` ops from op `first` on. `classes`: name of an op or input -> name of
    its representative.
    """
    places = [_places(wiring, first + k * block, block) for k in range(count)]
    start, stop = _longest_alike(places)
    # The copy before a run joins it if it differs only in the producers of what the others read of "the copy before".
    if start > 0 and _inherits(_first_places(wiring, first + (start - 1) * block, block), places[start]):
        start -= 1
    first, count = first + start * block, stop - start
    if count < 2:
        return None
    classes = _classes(graph, wiring, first, block, count)
    return None if classes is None else (first, count, classes)


def _places(wiring: Wiring, start: int, block: int) -> list[tuple[str, int, int]]:
    """For each input of each op of a copy, its producer relative to the copy."""
    return [_place(source, start, block) for sources in wiring.sources[start : start + block] for source in sources]


def _first_places(wiring: Wiring, start: int, block: int) -> list[tuple[str, int, int]]:
    """The places of a copy that no other copy precedes."""
    return [_place(source, start, 0) for sources in wiring.sources[start : start + block] for source in sources]


def _place(source: Source, start: int, block: int) -> tuple[str, int, int]:
    made, index = source
    if made >= start:
        return "same", made - start, index
    if made >= start - block:
        return "previous", made - start + block, index
    return ("input", 0, 0) if made < 0 else ("outside", made, index)


def _longest_alike(places: list[list[tuple[str, int, int]]]) -> tuple[int, int]:
    """[start, stop) of the longest run of copies with equal places, copy 0 left out: `_inherits` decides it."""
    best, start = (0, 0), 1
    for k in range(2, len(places) + 1):
        if k == len(places) or places[k] != places[start]:
            best = max(best, (start, k), key=lambda span: span[1] - span[0])
            start = k
    return best


def _inherits(before: list[tuple[str, int, int]], steady: list[tuple[str, int, int]]) -> bool:
    return all(a == b or (b[0] == "previous" and a[0] in ("outside", "input")) for a, b in zip(before, steady))


def _classes(graph: Graph, wiring: Wiring, first: int, block: int, count: int) -> dict[str, str] | None:
    """The class of every op of the copies and of every input that one copy reads alone; None on a contradiction."""
    classes: dict[str, str] = {}
    before: dict[tuple[int, int], Source] = {}
    owner: dict[int, tuple[int, int]] = {}
    for k in range(count):
        for j in range(block):
            op, same = graph.ops[first + k * block + j], graph.ops[first + j]
            classes[op.name] = same.name
            if not _match_inputs(wiring, first, block, k, j, count, before, owner):
                return None
    for index, (rep, _) in owner.items():
        a, b = graph.inputs[index], graph.inputs[rep]
        if (a.kind, a.value.shape, a.value.dtype, a.value.needs_grad) != (
            b.kind,
            b.value.shape,
            b.value.dtype,
            b.value.needs_grad,
        ):
            return None
        classes[a.value.name] = b.value.name
    return classes


def _match_inputs(
    wiring: Wiring,
    first: int,
    block: int,
    k: int,
    j: int,
    count: int,
    before: dict[tuple[int, int], Source],
    owner: dict[int, tuple[int, int]],
) -> bool:
    """Whether the inputs of op j of copy k match those of the other copies.

    `before`: output of copy -1 -> the value that is in its place; `owner`: input -> (its class, its copy). Both are
    extended.
    """
    steady, zero, now = (wiring.sources[first + c * block + j] for c in (1, 0, k))
    for later, original, source in zip(steady, zero, now):
        kind, made, index = _place(later, first + block, block)
        if kind == "previous" and k == 0 and before.setdefault((made, index), source) != source:
            return False
        if kind == "input" and later != original and owner.setdefault(source[1], (original[1], k)) != (original[1], k):
            return False
        if kind == "input" and later == original and source != original:
            return False
    return True
