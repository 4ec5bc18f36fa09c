"""The search problem in which no two copies of a block need be alike, read off the prices of a fold with a few of them
apart.

Of each repeat the first and the last copy are outside; those between are equal and make a chain. Copies 1 and 2 are
priced as classes of their own: what flows within copy 1 is the inner part of every copy, what flows from copy 1 to copy
2 the crossing part, and where copy 1 and copy 2 read the same node outside, all copies do. What the last of them hands
on is priced by the segment that it ends.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costmodel.pricing.price import Priced
from autopar.ir.folding.fold import Folded, Repeat, value_classes
from autopar.ir.folding.segments import Segments
from autopar.ir.graph import Graph
from autopar.sbp.assignment import Use, uses_of, written_buffer
from autopar.search.min_plus.repeat_power import Chain, Chains
from autopar.search.table import CostTable, Edge, Node

# With fewer copies all are classes of their own.
_LEAST_COPIES = 4
_UNIT, _NEXT, _ENDING = 1, 2, 3  # segments: copy 1, copy 2, and that which ends before the last copy

Place = tuple[int, int] | None  # a repeat and a segment of it; None outside
Pair = tuple[int, int]
Key = tuple[str, str]  # kind and class of an entity: the same in all copies


def copies_apart(folded: Folded) -> Segments:
    """The segments that `unfold` wants.

    >>> copies_apart(Folded({}, (Repeat(("a",), 3), Repeat(("b",), 4), Repeat(("c",), 32))))
    ((1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 28, 1))
    """
    counts = [repeat.count for repeat in folded.repeats]
    return tuple((1, 1, 1, count - 4, 1) if count > _LEAST_COPIES else (1,) * count for count in counts)


def unfold(graph: Graph, folded: Folded, priced: Priced) -> Chains:
    """The problem of all copies, each with choices of its own; `priced` is that of `segmented(folded, graph,
    copies_apart(folded))`.

    ValueError if the copies between the first and the last are not equal in what reads them.
    """
    numbers = [number for number, repeat in enumerate(folded.repeats) if repeat.count >= _LEAST_COPIES]
    _check_alike(graph, folded, [folded.repeats[number] for number in numbers])
    found = _placed(graph, folded, priced, numbers)
    outside = [v for v, place in enumerate(found.places) if place is None]
    of_outside = {v: i for i, v in enumerate(outside)}
    edges = [
        replace(e, a=of_outside[e.a], b=of_outside[e.b])
        for e in priced.table.edges
        if e.a in of_outside and e.b in of_outside
    ]
    chains = tuple(_chain(found, number, folded.repeats[number].count, of_outside) for number in numbers)
    return Chains(CostTable(tuple(priced.table.nodes[v] for v in outside), tuple(edges)), chains)


@dataclass(frozen=True)
class _Placed:
    """Where each entity is, and its key among those that are at the same place."""

    priced: Priced
    places: tuple[Place, ...]
    keys: tuple[Key, ...]

    def members(self, place: Place) -> dict[Key, int]:
        return {key: v for v, key in enumerate(self.keys) if self.places[v] == place}

    def between(self, place: Place, other: Place) -> dict[Pair, Edge]:
        """Edges from an entity here to one there: `a` and `b` as given, whichever comes first in the table."""
        found = {}
        for edge in self.priced.table.edges:
            for way in (edge, Edge(edge.b, edge.a, edge.cost_s.T, edge.memory_bytes.T)):
                if (self.places[way.a], self.places[way.b]) == (place, other) and (place != other or way is edge):
                    found[way.a, way.b] = way
        return found


def _chain(found: _Placed, number: int, count: int, of_outside: Mapping[int, int]) -> Chain:
    """The copies of one repeat between its first and its last."""
    here, there, end = ((number, segment) for segment in (_UNIT, _NEXT, min(_ENDING, count - 2)))
    unit = found.members(here)
    block = {key: j for j, key in enumerate(unit)}
    of_unit, of_next, of_end = (
        {v: block.get(key, -1) for key, v in found.members(place).items()} for place in (here, there, end)
    )
    inner, again = (_numbered(found.between(at, at), of, of) for at, of in ((here, of_unit), (there, of_next)))
    reads, reads_next = (
        _numbered(found.between(None, at), of_outside, of) for at, of in ((here, of_unit), (there, of_next))
    )
    ends = _numbered(found.between(end, None), of_end, of_outside)
    shared = {pair: edge for pair, edge in reads_next.items() if pair in reads}
    _check_copies(found, (here, there, end))
    _check_edges(inner, again)
    _check_edges({pair: reads[pair] for pair in shared}, shared if count == _LEAST_COPIES else reads_next)
    return Chain(
        count - 2,
        tuple(found.priced.table.nodes[v] for v in unit.values()),
        tuple(inner.values()),
        tuple(_numbered(found.between(here, there), of_unit, of_next).values()),
        enters=tuple(edge for pair, edge in reads.items() if pair not in shared),
        shared=tuple(shared.values()),
        leaves=tuple(edge for (j, v), edge in ends.items() if (v, j) not in shared),
    )


def _numbered(edges: Mapping[Pair, Edge], of_a: Mapping[int, int], of_b: Mapping[int, int]) -> dict[Pair, Edge]:
    return {(of_a[a], of_b[b]): replace(edge, a=of_a[a], b=of_b[b]) for (a, b), edge in edges.items()}


def _check_copies(found: _Placed, places: Sequence[tuple[int, int]]) -> None:
    """The copies have the same entities with the same options at the same price."""
    entities, nodes = found.priced.entities, found.priced.table.nodes
    unit, *others = (found.members(place) for place in places)
    for copy in others:
        if copy.keys() != unit.keys() or any(
            entities[unit[key]].options != entities[v].options for key, v in copy.items()
        ):
            raise ValueError("the copies of a repeat do not choose from the same")
    if not all(_same(nodes[unit[key]], nodes[v]) for key, v in others[0].items()):
        raise ValueError("the second and the third copy of a repeat have different prices")


def _check_edges(edges: Mapping[Pair, Edge], others: Mapping[Pair, Edge]) -> None:
    if edges.keys() != others.keys() or not all(_same(edge, others[pair]) for pair, edge in edges.items()):
        raise ValueError(
            "within the second and the third copy of a repeat, or with what all copies read, conversions differ"
        )


def _same(one: Node | Edge, other: Node | Edge) -> bool:
    pairs = ((one.cost_s, other.cost_s), (one.memory_bytes, other.memory_bytes))
    return all(a is b or np.array_equal(a, b) for a, b in pairs)


def _placed(graph: Graph, folded: Folded, priced: Priced, numbers: Sequence[int]) -> _Placed:
    classes = value_classes(graph, folded)
    copies = _copies(graph, folded, {number: folded.repeats[number] for number in numbers})
    segments = {place: (place[0], _segment(place[1], folded.repeats[place[0]].count)) for place in set(copies.values())}
    inside = {name: segments[place] for name, place in copies.items() if segments[place][1] in (_UNIT, _NEXT, _ENDING)}
    last = {number: (number, folded.repeats[number].count - 1) for number in numbers}
    places = tuple(None if copies.get(e.name) in last.values() else inside.get(e.name) for e in priced.entities)
    keys = tuple(
        (e.kind, folded.representative[e.name] if e.kind == "op" else classes[e.name]) for e in priced.entities
    )
    _check_meetings(priced, places)
    return _Placed(priced, places, keys)


def _segment(copy: int, count: int) -> int:
    """Which of `copies_apart` a copy is in."""
    return copy if copy < _ENDING else _ENDING + (copy == count - 1 and count > _LEAST_COPIES)


def _check_meetings(priced: Priced, places: Sequence[Place]) -> None:
    """Copies meet nodes outside, themselves and the copy after them alone."""
    for edge in priced.table.edges:
        a, b = places[edge.a], places[edge.b]
        if a is not None and b is not None and (a[0] != b[0] or abs(a[1] - b[1]) > 1):
            raise ValueError(
                f"{priced.table.nodes[edge.a].name} and {priced.table.nodes[edge.b].name} meet across copies"
            )


def _copies(graph: Graph, folded: Folded, repeats: Mapping[int, Repeat]) -> dict[str, tuple[int, int]]:
    """Name of each op and value of a copy -> (repeat, copy). An input is of the copy that alone reads it."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    copies: dict[str, tuple[int, int]] = {}
    for number, repeat in repeats.items():
        first, block = position[repeat.ops[0]], len(repeat.ops)
        for i, op in enumerate(graph.ops[first : first + block * repeat.count]):
            copies.update((name, (number, i // block)) for name in (op.name, *(value.name for value in op.outputs)))
    uses, members = uses_of(graph), Counter(folded.representative.values())
    for item in graph.inputs:
        name = item.value.name
        found = {copies.get(use.user) for use in uses.get(name, ()) if use.user != "buffer"}
        if members[folded.representative[name]] > 1 and len(found) == 1 and (place := found.pop()) is not None:
            copies[name] = place
    return copies


def _check_alike(graph: Graph, folded: Folded, repeats: Sequence[Repeat]) -> None:
    """What is made in a copy between the first and the last is read at the same places, counted from that copy, as in
    any other.
    """
    uses, position = uses_of(graph), {op.name: i for i, op in enumerate(graph.ops)}

    def read_by(start: int, block: int) -> list[frozenset[tuple]]:
        names = [value.name for op in graph.ops[start : start + block] for value in op.outputs]
        return [
            frozenset(_relative(use, position, start, graph, folded) for use in uses.get(name, ())) for name in names
        ]

    for repeat in repeats:
        first, block = position[repeat.ops[0]], len(repeat.ops)
        unit = read_by(first + block, block)
        if any(read_by(first + copy * block, block) != unit for copy in range(2, repeat.count - 1)):
            raise ValueError("what the copies of a repeat make is not read alike")


def _relative(use: Use, position: Mapping[str, int], start: int, graph: Graph, folded: Folded) -> tuple:
    if use.user == "buffer":
        return "buffer", folded.representative[written_buffer(graph, use.slot)]
    return ("output",) if use.user == "output" else (position[use.user] - start, use.slot)
