"""What there is to choose on a graph, and which choices meet: a value flows from where it is made to where it is read."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.memory import held_values
from autopar.costmodel.offered import Offered, Options, Stored, offered
from autopar.costmodel.probe import footprint, footprints, regatherable
from autopar.ir.fold import Folded, value_classes
from autopar.ir.graph import Graph, Value
from autopar.sbp.assignment import Use, gives_gradient, uses_of, written_buffer
from autopar.sbp.placement import Layout
from autopar.sbp.signature import Candidates


@dataclass(frozen=True)
class Entity:
    """One thing to choose for all members of a class. kind "op": options are strategies; "input": what is stored; "kept" and "output":
    layouts (see `Assignment`). `name` is that of the class: its representative op or value.
    """

    kind: str
    name: str
    options: Options


@dataclass(frozen=True, slots=True)
class End:
    """Where entity number `node` meets a value: port "in" or "out" `index` of an op; "stored" of an input; "layout" of the others."""

    node: int
    port: str = "layout"
    index: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What comes of a reading: whether what is read is kept for backward, and whether a gradient comes back."""

    is_saved: bool
    gives_gradient: bool


@dataclass(frozen=True, slots=True)
class Flow:
    """A value of class `value` goes from `src` to `dst` and is converted on the way. is_held: what leaves is in memory until backward
    anyhow."""

    value: str
    src: End
    dst: End
    reading: Reading
    is_held: bool


@dataclass(frozen=True)
class Flows:
    """`entities` in the order ops, inputs, kept, outputs; `counts`: how many readings take each flow; `offered`: the layouts at the ends
    of the flows; `parameters`: the classes of parameters; `values`: the class of a value -> its representative."""

    entities: tuple[Entity, ...]
    counts: Mapping[Flow, int]
    offered: Mapping[End, Offered]
    parameters: frozenset[str]
    values: Mapping[str, Value]

    def is_bucketed(self, flow: Flow) -> bool:
        """Whether the value leaves from where it is stored, to have its gradient reduced together with others (`assignment.buckets`)."""
        return flow.value in self.parameters and self.entities[flow.src.node].kind == "input"


Reader = tuple[str, int]  # an op's class and slot, or as in `Use`


def find_flows(graph: Graph, folded: Folded, candidates: Candidates) -> Flows:
    """All entities of the graph, and the flows between them: those of `assignment.conversions`, class by class."""
    classes = value_classes(graph, folded)
    entities = _chosen(graph, folded, candidates, classes)
    nodes = {(entity.kind, entity.name): node for node, entity in enumerate(entities)}
    sources, readers = _sources(graph, nodes), _readers(graph, folded, classes, nodes)
    counts: Counter[Flow] = Counter()
    for (name, read_by, is_held), count in _alike(graph, folded, classes).items():
        kept = End(nodes["kept", name]) if len(read_by) > 1 else None
        for flow in _flows(name, sources[name], kept, [readers[reader] for reader in read_by], is_held=is_held):
            counts[flow] += count
    values = {v.name: v for v in _values(graph) if classes[v.name] == v.name}
    parameters = frozenset(classes[item.value.name] for item in graph.of_kind("parameter"))
    ends = _offered(entities, counts)
    return Flows(tuple(_with_kept_options(entities, ends)), counts, ends, parameters, values)


def _alike(graph: Graph, folded: Folded, classes: Mapping[str, str]) -> Counter[tuple[str, tuple[Reader, ...], bool]]:
    """How many values are of each class, read by the same and held or not."""
    held = held_values(graph, footprints(graph, folded.representative))
    return Counter(
        (classes[name], tuple((folded.representative.get(use.user, use.user), use.slot) for use in uses), name in held)
        for name, uses in uses_of(graph).items()
    )


def _flows(value: str, src: End, kept: End | None, readers: Sequence[tuple[End, Reading]], *, is_held: bool) -> Iterator[Flow]:
    """The flows of one value, by its kept layout if it has one."""
    if kept is not None:
        saved, gives = (any(getattr(reading, field) for _, reading in readers) for field in ("is_saved", "gives_gradient"))
        yield Flow(value, src, kept, Reading(saved, gives), is_held)
        src, is_held = kept, True
    yield from (Flow(value, src, end, reading, is_held) for end, reading in readers)


def _values(graph: Graph) -> list[Value]:
    return [item.value for item in graph.inputs] + [value for op in graph.ops for value in op.outputs]


def _chosen(graph: Graph, folded: Folded, candidates: Candidates, classes: Mapping[str, str]) -> list[Entity]:
    """The entities; the kept ones still without options."""
    ops = [Entity("op", op.name, candidates.strategies[op.name]) for op in graph.ops if folded.representative[op.name] == op.name]
    names, again = [item.value.name for item in graph.inputs], regatherable(graph, folded.representative)
    inputs = [Entity("input", n, _stored(candidates.layouts[n], n in again)) for n in names if folded.representative[n] == n]
    several = {classes[name]: None for name, uses in uses_of(graph).items() if len(uses) > 1}
    outputs: dict[str, Entity] = {}
    for value in graph.outputs:
        if isinstance(value, Value):
            outputs.setdefault(classes[value.name], Entity("output", classes[value.name], candidates.outputs[value.name]))
    return ops + inputs + [Entity("kept", name, ()) for name in several] + list(outputs.values())


def _stored(layouts: tuple[Layout, ...], is_regatherable: bool) -> tuple[Stored, ...]:
    """Each layout, and those that have something to gather once more, regathered."""
    again = [layout for layout in layouts if is_regatherable and any(placement.is_split for placement in layout)]
    return (*map(Stored, layouts), *(Stored(layout, is_regathered=True) for layout in again))


def _sources(graph: Graph, nodes: Mapping[tuple[str, str], int]) -> dict[str, End]:
    """Where the values of each class are made."""
    names = [item.value.name for item in graph.inputs if ("input", item.value.name) in nodes]
    sources = {name: End(nodes["input", name], "stored") for name in names}
    for op in graph.ops:
        if ("op", op.name) in nodes:
            sources.update((value.name, End(nodes["op", op.name], "out", index)) for index, value in enumerate(op.outputs))
    return sources


def _readers(
    graph: Graph, folded: Folded, classes: Mapping[str, str], nodes: Mapping[tuple[str, str], int]
) -> dict[Reader, tuple[End, Reading]]:
    """Where each reader meets what it reads, and what comes of it."""
    ops = {op.name: op for op in graph.ops if ("op", op.name) in nodes}
    found: dict[Reader, tuple[End, Reading]] = {}
    for index, value in enumerate(graph.outputs):
        if isinstance(value, Value):
            found["output", index] = End(nodes["output", classes[value.name]]), Reading(is_saved=False, gives_gradient=True)
    for index in range(len(graph.mutations)):
        end = End(nodes["input", classes[written_buffer(graph, index)]], "stored")
        found["buffer", index] = end, Reading(is_saved=False, gives_gradient=False)
    for op in ops.values():
        saved = footprint(op).saved_inputs
        for slot in range(len(op.inputs)):
            reading = Reading(slot in saved, gives_gradient(Use(op.name, slot), ops))
            found[op.name, slot] = End(nodes["op", op.name], "in", slot), reading
    return found


def _offered(entities: Sequence[Entity], flows: Iterable[Flow]) -> dict[End, Offered]:
    """The layouts at every end. A kept layout is one the value can be made in or can be wanted in."""
    found: dict[End, Offered] = {}
    known: dict[tuple[int, str, int], Offered] = {}  # equal ops have the same tuple of strategies
    kept: dict[End, dict[Layout, None]] = {}
    for flow in flows:
        for end in (flow.src, flow.dst):
            options = entities[end.node].options
            if entities[end.node].kind == "kept":
                kept.setdefault(end, {})
            elif end not in found:
                key = id(options), end.port, end.index
                found[end] = known[key] = known.get(key) or offered(options, end.port, end.index)
        for mine, other in ((flow.src, flow.dst), (flow.dst, flow.src)):
            if mine in kept:
                kept[mine].update(dict.fromkeys(found[other].layouts))
    return found | {end: offered(tuple(layouts), end.port, end.index) for end, layouts in kept.items()}


def _with_kept_options(entities: Sequence[Entity], ends: Mapping[End, Offered]) -> Iterator[Entity]:
    for node, entity in enumerate(entities):
        yield replace(entity, options=ends[End(node)].layouts) if entity.kind == "kept" else entity
