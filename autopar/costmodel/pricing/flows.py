"""Entities, the decisions of a graph, and flows, the conversions of values between two entities."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from autopar.costmodel.activations.activation_offload import Moving, movings
from autopar.costmodel.activations.autograd_footprint import footprints, regatherable
from autopar.costmodel.activations.saved_activations import (
    NOWHERE,
    Regions,
    Saving,
    inside_shares,
    region_of_ops,
    savings,
)
from autopar.costmodel.activations.transients import Transient, largest_transient
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.pricing.options import Offered, Options, Stored, offered
from autopar.costmodel.state_offload import brought_shares
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.folding.fold import Folded, value_classes
from autopar.ir.graph import Graph, Value
from autopar.sbp.analysis.sampled_graph import Sampled
from autopar.sbp.assignment import gradient_givers, written_buffer
from autopar.sbp.placement import Layout
from autopar.sbp.signature import Candidates


@dataclass(frozen=True)
class Entity:
    """A decision for all members of a class.

    `kind` "op": `options` are strategies; "input": `Stored` layouts; "kept" and "output": layouts (see `Assignment`).
    `name`: the representative op or value of the class.
    """

    kind: str
    name: str
    options: Options


@dataclass(frozen=True, slots=True)
class End:
    """One end of a flow at entity number `node`.

    `port`: "in" or "out" number `index` of an op, "stored" of an input, "layout" of the other kinds.
    """

    node: int
    port: str = "layout"
    index: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """The conversion of a value of class `value` between the layouts of two entities.

    `saving`: its memory, with region 0 or NOWHERE; `gives_gradient`: whether a gradient is propagated back.
    """

    value: str
    src: End
    dst: End
    saving: Saving
    gives_gradient: bool


@dataclass(slots=True)
class Count:
    """The multiplicities of a flow, an op or an input, summed over the members of its class.

    `times`: occurrences in all.
    `num_inside`: occurrences in recomputed regions; `share`: the sum of the weights of their bytes there.
    `num_moved`: occurrences in offloaded regions; `moved_share`: the sum of the weights of their bytes on the device;
        `moved_s`: the sum of the seconds of waiting for each byte.
    `num_on_host`: occurrences with optimizer state on the host; `brought_share`: the sum of its weights on the device.
    `transient_share`: the sum of the weights of their transients.
    `num_pending`: occurrences whose gradient does not exist yet at the largest transient.
    """

    times: int = 0
    num_inside: int = 0
    share: float = 0.0
    num_moved: int = 0
    moved_share: float = 0.0
    moved_s: float = 0.0
    num_on_host: int = 0
    brought_share: float = 0.0
    transient_share: float = 0.0
    num_pending: int = 0

    @property
    def numbers(self) -> tuple[float, ...]:
        """All of these, in order."""
        return _numbers(self)

    def add(self, other: "Count", num: int = 1) -> None:
        """Add `num` times what `other` says; a transient is there once."""
        for name in self.__slots__:
            times = 1 if name == "transient_share" else num
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


_numbers = attrgetter(*Count.__slots__)


@dataclass(frozen=True)
class Flows:
    """The entities of a graph, in the order ops, inputs, kept, outputs, and the flows between them.

    `counts`: flow -> its multiplicities; `members`: class of an op or input -> its multiplicities; `offered`: end of a
    flow -> its possible layouts; `parameters`: classes of parameters; `values`: class of a value -> its representative.
    """

    entities: tuple[Entity, ...]
    counts: Mapping[Flow, Count]
    members: Mapping[str, Count]
    offered: Mapping[End, Offered]
    parameters: frozenset[str]
    values: Mapping[str, Value]

    def is_stored(self, flow: Flow) -> bool:
        """Whether the flow starts at an input, in its stored layout."""
        return self.entities[flow.src.node].kind == "input"


Reader = tuple[str, int]  # an op's class and slot, or as in `Use`


@dataclass(frozen=True)
class _RegionWeights:
    """The regions of ops, with the weights that they give to bytes.

    `shares`: of the inside of each recomputed region; `movings`: of each offloaded region; `brought`: parameter with
    state on the host -> share of its state on the device; `transient`: the largest.
    """

    recomputed: Mapping[str, int]
    offloaded: Mapping[str, int]
    shares: Sequence[float]
    movings: Sequence[Moving]
    brought: Mapping[str, float]
    transient: Transient

    def count(self, region: int, moved_in: int) -> Count:
        """The multiplicities of one occurrence in `region` that is offloaded in `moved_in`."""
        occurrences = Count(1) if region == NOWHERE else Count(1, 1, self.shares[region])
        if moved_in != NOWHERE:
            moving = self.movings[moved_in]
            occurrences.num_moved, occurrences.moved_share, occurrences.moved_s = (
                1,
                moving.share,
                moving.forward_s + moving.backward_s,
            )
        return occurrences

    def count_of(self, name: str) -> Count:
        """The multiplicities of one occurrence of an op or an input."""
        if name in self.brought or name in self.transient.pending:
            is_away, is_pending = name in self.brought, name in self.transient.pending
            return Count(
                1, num_on_host=int(is_away), brought_share=self.brought.get(name, 0.0), num_pending=int(is_pending)
            )
        region = self.recomputed.get(name, NOWHERE)
        occurrences = self.count(region, NOWHERE if region != NOWHERE else self.offloaded.get(name, NOWHERE))
        occurrences.transient_share = self.transient.ops.get(name, 0.0)
        return occurrences


def find_flows(
    sampled: Sampled,
    folded: Folded,
    candidates: Candidates,
    cluster: Cluster,
    recomputed: Regions = (),
    offloaded: Regions = (),
    training: Training = WHOLE_BATCH,
    state_on_host: Collection[str] = (),
) -> Flows:
    """All entities of the graph, and the flows between them: those of `assignment.conversions`, class by class.

    What the sampled graph lacks is counted. recomputed, offloaded, state_on_host: of those in it.
    """
    graph = sampled.graph
    classes = value_classes(graph, folded)
    entities = _chosen(graph, folded, candidates, classes)
    nodes = {(entity.kind, entity.name): node for node, entity in enumerate(entities)}
    sources, readers = _sources(graph, nodes), _readers(graph, folded, classes, nodes)
    known = footprints(graph, folded.representative)
    saved = savings(graph, known, recomputed, offloaded)
    places = _RegionWeights(
        region_of_ops(recomputed),
        region_of_ops(offloaded),
        inside_shares(
            graph, known, recomputed, saved, training.num_waiting, [sampled.num(region[0]) for region in recomputed]
        ),
        movings(sampled, known, recomputed, offloaded, saved, cluster),
        brought_shares(graph, state_on_host, sampled.num),
        largest_transient(sampled, known, recomputed, offloaded, training.num_microbatches),
    )
    counts: defaultdict[Flow, Count] = defaultdict(Count)
    for (name, read_by, alike), each in _alike(sampled, folded, classes, saved, places).items():
        kept = End(nodes["kept", name]) if len(read_by) > 1 else None
        for flow, count in zip(_flows(name, sources[name], kept, [readers[reader] for reader in read_by], alike), each):
            counts[flow].add(count)
    values = {v.name: v for v in _values(graph) if classes[v.name] == v.name}
    parameters = frozenset(classes[item.value.name] for item in graph.of_kind("parameter"))
    ends = _offered(entities, counts)
    members = _members(sampled, folded, places)
    return Flows(tuple(_with_kept_options(entities, ends)), counts, members, ends, parameters, values)


def _alike(
    sampled: Sampled,
    folded: Folded,
    classes: Mapping[str, str],
    saved: Mapping[str, tuple[Saving, ...]],
    places: _RegionWeights,
) -> dict[tuple[str, tuple[Reader, ...], tuple[Saving, ...]], list[Count]]:
    """(class, readers, savings) of values -> the multiplicities of each of their conversions."""
    alike: dict[tuple, list[Count]] = {}
    for name, uses in sampled.graph.uses.items():
        read_by = tuple((folded.representative.get(use.user, use.user), use.slot) for use in uses)
        kept = tuple(_numberless(saving) for saving in saved[name])
        counts = alike.setdefault((classes[name], read_by, kept), [Count() for _ in kept])
        for count, saving, num in zip(counts, saved[name], sampled.num_conversions(name)):
            count.add(places.count(saving.region, saving.moved_in), num)
    return alike


def _numberless(saving: Saving) -> Saving:
    """The saving with region numbers dropped, equal for all regions."""
    if saving.region <= 0 and saving.moved_in <= 0:
        return saving
    return replace(saving, region=min(saving.region, 0), moved_in=min(saving.moved_in, 0))


def _members(sampled: Sampled, folded: Folded, places: _RegionWeights) -> dict[str, Count]:
    members: defaultdict[str, Count] = defaultdict(Count)
    for name in (*(op.name for op in sampled.graph.ops), *(item.value.name for item in sampled.graph.inputs)):
        members[folded.representative[name]].add(places.count_of(name), sampled.num(name))
    return dict(members)


def _flows(
    value: str, src: End, kept: End | None, readers: Sequence[tuple[End, bool]], savings: Sequence[Saving]
) -> Iterator[Flow]:
    """The flows of one value in the order of its conversions, through its kept layout if it has one."""
    if kept is not None:
        yield Flow(value, src, kept, savings[0], any(gives for _, gives in readers))
        src, savings = kept, savings[1:]
    yield from (Flow(value, src, end, saving, gives) for (end, gives), saving in zip(readers, savings))


def _values(graph: Graph) -> list[Value]:
    return [item.value for item in graph.inputs] + [value for op in graph.ops for value in op.outputs]


def _chosen(graph: Graph, folded: Folded, candidates: Candidates, classes: Mapping[str, str]) -> list[Entity]:
    """The entities of the graph; the options of kept ones are added later."""
    ops = [
        Entity("op", op.name, candidates.strategies[op.name])
        for op in graph.ops
        if folded.representative[op.name] == op.name
    ]
    names, again = [item.value.name for item in graph.inputs], regatherable(graph, folded.representative)
    inputs = [
        Entity("input", n, _stored(candidates.layouts[n], n in again)) for n in names if folded.representative[n] == n
    ]
    several = {classes[name]: None for name, uses in graph.uses.items() if len(uses) > 1}
    outputs: dict[str, Entity] = {}
    for value in graph.placed_outputs:
        outputs.setdefault(classes[value.name], Entity("output", classes[value.name], candidates.outputs[value.name]))
    return ops + inputs + [Entity("kept", name, ()) for name in several] + list(outputs.values())


def _stored(layouts: tuple[Layout, ...], is_regatherable: bool) -> tuple[Stored, ...]:
    """An option for each layout, and a regathered one for each layout that has a split to gather."""
    again = [layout for layout in layouts if is_regatherable and any(placement.is_split for placement in layout)]
    return (*map(Stored, layouts), *(Stored(layout, is_regathered=True) for layout in again))


def _sources(graph: Graph, nodes: Mapping[tuple[str, str], int]) -> dict[str, End]:
    """Class of a value -> the end at which it is produced."""
    names = [item.value.name for item in graph.inputs if ("input", item.value.name) in nodes]
    sources = {name: End(nodes["input", name], "stored") for name in names}
    for op in graph.ops:
        if ("op", op.name) in nodes:
            sources.update(
                (value.name, End(nodes["op", op.name], "out", index)) for index, value in enumerate(op.outputs)
            )
    return sources


def _readers(
    graph: Graph, folded: Folded, classes: Mapping[str, str], nodes: Mapping[tuple[str, str], int]
) -> dict[Reader, tuple[End, bool]]:
    """Reader -> (its end, whether it propagates a gradient back)."""
    giving = gradient_givers(graph)
    readers: dict[Reader, tuple[End, bool]] = {}
    carried = dict(graph.carried)
    for index, value in enumerate(graph.outputs):
        if index in carried:
            readers["output", index] = End(nodes["input", classes[carried[index]]], "stored"), False
        elif isinstance(value, Value):
            readers["output", index] = End(nodes["output", classes[value.name]]), True
    for index in range(len(graph.mutations)):
        readers["buffer", index] = End(nodes["input", classes[written_buffer(graph, index)]], "stored"), False
    for op in (op for op in graph.ops if ("op", op.name) in nodes):
        for slot in range(len(op.inputs)):
            readers[op.name, slot] = End(nodes["op", op.name], "in", slot), op.name in giving
    return readers


def _offered(entities: Sequence[Entity], flows: Iterable[Flow]) -> dict[End, Offered]:
    """End -> its possible layouts; those of a kept entity are all in which the value can be produced or read."""
    offered_at: dict[End, Offered] = {}
    known: dict[tuple[int, str, int], Offered] = {}  # equal ops have the same tuple of strategies
    kept: dict[End, dict[Layout, None]] = {}
    taken: set[tuple[End, int]] = set()
    for flow in flows:
        for end in (flow.src, flow.dst):
            options = entities[end.node].options
            if entities[end.node].kind == "kept":
                kept.setdefault(end, {})
            elif end not in offered_at:
                key = id(options), end.port, end.index
                offered_at[end] = known[key] = known.get(key) or offered(options, end.port, end.index)
        for mine, other in ((flow.src, flow.dst), (flow.dst, flow.src)):
            if mine in kept and (mine, id(offered_at[other])) not in taken:
                taken.add((mine, id(offered_at[other])))
                kept[mine].update(dict.fromkeys(offered_at[other].layouts))
    return offered_at | {end: offered(tuple(layouts), end.port, end.index) for end, layouts in kept.items()}


def _with_kept_options(entities: Sequence[Entity], ends: Mapping[End, Offered]) -> Iterator[Entity]:
    for node, entity in enumerate(entities):
        yield replace(entity, options=ends[End(node)].layouts) if entity.kind == "kept" else entity
