"""What there is to choose on a graph, and which choices meet: a value flows from where it is made to where it is read."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel.memory import held_values
from autopar.costmodel.probe import footprint
from autopar.ir.fold import Folded
from autopar.ir.graph import Graph, Op, Value
from autopar.sbp.assignment import Use, uses_of
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
class Flow:
    """A value of class `value` goes from `src` to `dst` and is converted on the way. is_saved: what arrives is kept for backward;
    is_held: what leaves is in memory until backward anyhow.
    """

    value: str
    src: End
    dst: End
    is_saved: bool
    is_held: bool


@dataclass(frozen=True)
class Flows:
    """`entities` in the order ops, inputs, kept, outputs; `counts`: how many distinct values take each flow; `values`: the class of a
    value -> its representative."""

    entities: tuple[Entity, ...]
    counts: Mapping[Flow, int]
    values: Mapping[str, Value]


def value_classes(graph: Graph, folded: Folded) -> dict[str, str]:
    """Value name -> name of the value that represents it."""
    ops = {op.name: op for op in graph.ops}
    classes = {item.value.name: folded.representative[item.value.name] for item in graph.inputs}
    for op in graph.ops:
        representative = ops[folded.representative[op.name]]
        classes.update((mine.name, theirs.name) for mine, theirs in zip(op.outputs, representative.outputs))
    return classes


def find_flows(graph: Graph, folded: Folded, candidates: Candidates) -> Flows:
    """All entities of the graph, and the flows between them."""
    classes = value_classes(graph, folded)
    entities = _chosen(graph, folded, candidates, classes)
    nodes = {(entity.kind, entity.name): node for node, entity in enumerate(entities)}
    sources = _sources(graph, nodes)
    ops, held = {op.name: op for op in graph.ops}, held_values(graph)
    counts: Counter[Flow] = Counter()
    for name, uses in uses_of(graph).items():
        src = sources[classes[name]]
        readers = {_end(graph, folded, classes, nodes, use): _saves(ops, use) for use in uses}
        if len(uses) > 1:
            kept = End(nodes["kept", classes[name]])
            counts[Flow(classes[name], src, kept, any(readers.values()), name in held)] += 1
            counts.update(Flow(classes[name], kept, end, saved, True) for end, saved in readers.items())
        else:
            counts.update(Flow(classes[name], src, end, saved, name in held) for end, saved in readers.items())
    values = {v.name: v for v in _values(graph) if classes[v.name] == v.name}
    return Flows(_with_kept_options(entities, counts), counts, values)


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
