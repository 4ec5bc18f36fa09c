"""What there is to choose on a graph, and which choices meet: a value flows from where it is made to where it is read."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.costmodel.memory import held_values
from autopar.costmodel.probe import footprint
from autopar.ir.fold import Folded, value_classes
from autopar.ir.graph import Graph, Op, Value
from autopar.sbp.assignment import Use, gives_gradient, uses_of
from autopar.sbp.placement import Layout
from autopar.sbp.signature import Candidates, Strategy


@dataclass(frozen=True)
class Entity:
    """One thing to choose for all members of a class. kind "op": options are strategies; "input", "kept" and "output": layouts
    (see `Assignment`). `name` is that of the class: its representative op or value.
    """

    kind: str
    name: str
    options: tuple[Strategy, ...] | tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Where entity number `node` meets a value: port "in" or "out" `index` of an op; "layout" of the other kinds."""

    node: int
    port: str = "layout"
    index: int = 0

    def layout(self, option: Strategy | Layout) -> Layout:
        """The value's layout if the entity takes `option`."""
        if self.port == "in":
            return option.input_layout(self.index)
        return option.output_layout(self.index) if self.port == "out" else option


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
    """`entities` in the order ops, inputs, kept, outputs; `counts`: how many distinct values take each flow; `relaxed`: flow -> for how
    many values its seconds, and for how many its bytes, count in `Priced.relaxed`; `parameters`: the classes of parameters; `values`: the
    class of a value -> its representative."""

    entities: tuple[Entity, ...]
    counts: Mapping[Flow, int]
    relaxed: Mapping[Flow, tuple[float, float]]
    parameters: frozenset[str]
    values: Mapping[str, Value]


def find_flows(graph: Graph, folded: Folded, candidates: Candidates) -> Flows:
    """All entities of the graph, and the flows between them."""
    classes = value_classes(graph, folded)
    entities = _chosen(graph, folded, candidates, classes)
    nodes = {(entity.kind, entity.name): node for node, entity in enumerate(entities)}
    sources = _sources(graph, nodes)
    ops, held = {op.name: op for op in graph.ops}, held_values(graph)
    counts: Counter[Flow] = Counter()
    relaxed: dict[Flow, tuple[float, float]] = {}
    for name, uses in uses_of(graph).items():
        src = sources[classes[name]]
        readers = {_end(graph, folded, classes, nodes, use): Reading(_saves(ops, use), gives_gradient(use, ops)) for use in uses}
        kept = End(nodes["kept", classes[name]]) if len(uses) > 1 else None
        counts.update(_flows(classes[name], src, kept, readers, is_held=name in held))
        for flow, share in _relaxed_flows(classes[name], src, kept, readers, is_held=name in held):
            seconds, num_bytes = relaxed.get(flow, (0.0, 0.0))
            relaxed[flow] = seconds + share[0], num_bytes + share[1]
    values = {v.name: v for v in _values(graph) if classes[v.name] == v.name}
    parameters = frozenset(classes[item.value.name] for item in graph.of_kind("parameter"))
    return Flows(_with_kept_options(entities, counts), counts, relaxed, parameters, values)


def _flows(value: str, src: End, kept: End | None, readers: Mapping[End, Reading], *, is_held: bool) -> Iterator[Flow]:
    """The flows of one value, by its kept layout if it has one."""
    if kept is not None:
        yield _first(value, src, kept, readers, is_held)
        src, is_held = kept, True
    yield from (Flow(value, src, end, reading, is_held) for end, reading in readers.items())


def _first(value: str, src: End, kept: End, readers: Mapping[End, Reading], is_held: bool) -> Flow:
    """To the kept layout, for all readers."""
    saved, gives = (any(getattr(reading, field) for reading in readers.values()) for field in ("is_saved", "gives_gradient"))
    return Flow(value, src, kept, Reading(saved, gives), is_held)


def _relaxed_flows(
    value: str, src: End, kept: End | None, readers: Mapping[End, Reading], *, is_held: bool
) -> Iterator[tuple[Flow, tuple[float, float]]]:
    """Flows as if every reader shared its conversion and its copy with all the others, which never costs more: (flow, shares)."""
    num_readers, num_savers = 1, 1
    if kept is not None:
        first = _first(value, src, kept, readers, is_held)
        # of a value that is not held, backward has just what its readers want
        yield replace(first, reading=replace(first.reading, is_saved=first.reading.is_saved and is_held)), (1.0, 1.0)
        src, num_readers, num_savers = kept, len(readers), max(1, sum(reading.is_saved for reading in readers.values()))
    for end, reading in readers.items():
        yield Flow(value, src, end, reading, is_held), (1 / num_readers, 1 / num_savers)


def _values(graph: Graph) -> list[Value]:
    return [item.value for item in graph.inputs] + [value for op in graph.ops for value in op.outputs]


def _chosen(graph: Graph, folded: Folded, candidates: Candidates, classes: Mapping[str, str]) -> list[Entity]:
    """The entities; the kept ones still without options."""
    ops = [Entity("op", op.name, candidates.strategies[op.name]) for op in graph.ops if folded.representative[op.name] == op.name]
    names = [item.value.name for item in graph.inputs]
    inputs = [Entity("input", name, candidates.layouts[name]) for name in names if folded.representative[name] == name]
    several = {classes[name]: None for name, uses in uses_of(graph).items() if len(uses) > 1}
    outputs: dict[str, Entity] = {}
    for value in graph.outputs:
        if isinstance(value, Value):
            outputs.setdefault(classes[value.name], Entity("output", classes[value.name], candidates.outputs[value.name]))
    return ops + inputs + [Entity("kept", name, ()) for name in several] + list(outputs.values())


def _sources(graph: Graph, nodes: Mapping[tuple[str, str], int]) -> dict[str, End]:
    """Where the values of each class are made."""
    sources = {item.value.name: End(nodes["input", item.value.name]) for item in graph.inputs if ("input", item.value.name) in nodes}
    for op in graph.ops:
        if ("op", op.name) in nodes:
            sources.update((value.name, End(nodes["op", op.name], "out", index)) for index, value in enumerate(op.outputs))
    return sources


def _end(graph: Graph, folded: Folded, classes: Mapping[str, str], nodes: Mapping[tuple[str, str], int], use: Use) -> End:
    if use.user == "output":
        return End(nodes["output", classes[graph.outputs[use.slot].name]])
    if use.user == "buffer":
        fqn = graph.mutations[use.slot][0]
        name = next(item.value.name for item in graph.of_kind("buffer") if item.fqn == fqn)
        return End(nodes["input", classes[name]])
    return End(nodes["op", folded.representative[use.user]], "in", use.slot)


def _saves(ops: Mapping[str, Op], use: Use) -> bool:
    return use.user in ops and use.slot in footprint(ops[use.user]).saved_inputs


def _with_kept_options(entities: list[Entity], counts: Mapping[Flow, int]) -> tuple[Entity, ...]:
    """A kept layout is one the value can be made in or can be wanted in."""
    options: dict[int, dict[Layout, None]] = {node: {} for node, entity in enumerate(entities) if entity.kind == "kept"}
    for flow in counts:
        for mine, other in ((flow.src, flow.dst), (flow.dst, flow.src)):
            if mine.node in options:
                options[mine.node].update((other.layout(option), None) for option in entities[other.node].options)
    return tuple(replace(entity, options=tuple(options.get(node, entity.options))) for node, entity in enumerate(entities))
