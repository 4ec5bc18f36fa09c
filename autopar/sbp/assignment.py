"""An assignment says where everything is; the conversions between its layouts follow from it, for pricing and for
lowering alike.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Op, Value
from autopar.sbp.placement import I, Layout, R
from autopar.sbp.redistribute import redistribute
from autopar.sbp.signature import Strategy

# Gradients are reduced together once they are this many bytes, as DistributedDataParallel does by default (its
# bucket_cap_mb).
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Assignment:
    """strategies: op name -> strategy. layouts: input value name -> layout stored or handed in. kept: name of a value
    with several uses -> the layout it is converted to once, from which each use is served by itself. outputs: output
    value name -> layout it leaves in. regathered: parameters that are not kept as their one reader has them, but
    converted again for its backward (unless it takes a role). recomputed: regions, each the names of consecutive ops,
    of which only what enters them is kept for backward. offloaded: regions of which what is kept for backward waits in
    the host's memory; a recomputed one lies within one or outside all. state_on_host: names of the parameters whose
    optimizer state does so too, but while they are updated.
    """

    strategies: Mapping[str, Strategy]
    layouts: Mapping[str, Layout]
    kept: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    regathered: frozenset[str] = frozenset()
    recomputed: tuple[tuple[str, ...], ...] = ()
    offloaded: tuple[tuple[str, ...], ...] = ()
    state_on_host: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Use:
    """One reading of a value: slot `slot` of op `user`; a graph output (user "output") or a buffer's write-back
    ("buffer").
    """

    user: str
    slot: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """`value` in layout `src` is turned into `dst` for `uses`: for one of them, or for all to start from.

    `value.needs_grad` says whether a gradient comes back this way: none does where all that read it have none
    themselves. `is_bucketed`: all it does is to reduce a parameter's gradient, which is done together with others.
    `is_regathered`: what it makes is not kept for backward, but made again.
    """

    value: Value
    src: Layout
    dst: Layout
    uses: tuple[Use, ...]
    is_bucketed: bool = False
    is_regathered: bool = False

    @property
    def latency_share(self) -> float:
        """What part of a collective's latency it stands for."""
        return latency_share(self.value) if self.is_bucketed else 1.0


def uses_of(graph: Graph) -> dict[str, list[Use]]:
    """All readings of every value, in graph order."""
    uses: dict[str, list[Use]] = defaultdict(list)
    for op in graph.ops:
        for slot, value in enumerate(op.inputs):
            uses[value.name].append(Use(op.name, slot))
    for index, value in enumerate(graph.outputs):
        if isinstance(value, Value):
            uses[value.name].append(Use("output", index))
    for index, (_, value) in enumerate(graph.mutations):
        uses[value.name].append(Use("buffer", index))
    return dict(uses)


def produced_layouts(graph: Graph, assignment: Assignment) -> dict[str, Layout]:
    """Layout in which each value comes into being."""
    layouts = {item.value.name: assignment.layouts[item.value.name] for item in graph.inputs}
    for op in graph.ops:
        for index, value in enumerate(op.outputs):
            layouts[value.name] = assignment.strategies[op.name].output_layout(index)
    return layouts


def written_buffer(graph: Graph, index: int) -> str:
    """Name of the input value that mutation number `index` writes back to."""
    fqn = graph.mutations[index][0]
    return next(item.value.name for item in graph.inputs if item.kind == "buffer" and item.fqn == fqn)


def wanted_layout(graph: Graph, assignment: Assignment, use: Use) -> Layout:
    """Layout in which a use reads its value."""
    if use.user == "output":
        return assignment.outputs[graph.outputs[use.slot].name]
    if use.user == "buffer":
        return assignment.layouts[written_buffer(graph, use.slot)]
    return assignment.strategies[use.user].input_layout(use.slot)


def conversions(graph: Graph, assignment: Assignment) -> dict[str, tuple[Conversion, ...]]:
    """For each value that is read, its conversions in order: of several uses, first to the kept layout for all of them,
    then from there for each use by itself; a single use is served from the layout in which the value comes into being.

    Uses share nothing but the kept copy, so that what each costs depends on one pair of layouts. A conversion with `src
    == dst` does nothing and is listed all the same.
    """
    produced, ops = produced_layouts(graph, assignment), {op.name: op for op in graph.ops}
    values = {item.value.name: item.value for item in graph.inputs} | {
        v.name: v for op in graph.ops for v in op.outputs
    }
    parameters = {item.value.name for item in graph.of_kind("parameter")}
    found: dict[str, tuple[Conversion, ...]] = {}
    for name, uses in uses_of(graph).items():
        wanted = [(wanted_layout(graph, assignment, use), (use,)) for use in uses]
        kept = assignment.kept.get(name, produced[name]) if len(uses) > 1 else produced[name]
        ways = [(produced[name], kept, tuple(uses))] if len(uses) > 1 else []
        ways += [(kept, dst, use) for dst, use in wanted]
        made = [Conversion(_as_read(values[name], served, ops), src, dst, served) for src, dst, served in ways]
        if name in parameters and _only_reduces_gradient(made[0]):
            made[0] = replace(made[0], is_bucketed=True)
        elif name in assignment.regathered and len(uses) == 1 and _is_run_as_it_is(assignment, uses[0]):
            made[0] = replace(made[0], is_regathered=True)
        found[name] = tuple(made)
    return found


def _is_run_as_it_is(assignment: Assignment, use: Use) -> bool:
    """Whether an op reads, and not by a local implementation, which may save other tensors than the op does."""
    strategy = assignment.strategies.get(use.user)
    return strategy is not None and not any(signature.role for signature in strategy.signatures)


def _as_read(value: Value, uses: Iterable[Use], ops: Mapping[str, Op]) -> Value:
    """`value`, with a gradient if it gets one from any of `uses`."""
    gives = value.needs_grad and any(gives_gradient(use, ops) for use in uses)
    return value if gives == value.needs_grad else replace(value, needs_grad=gives)


def gives_gradient(use: Use, ops: Mapping[str, Op]) -> bool:
    """Whether a gradient can come back from a reading of a value that needs one; `ops` by name."""
    if use.user in ops:
        op = ops[use.user]
        return not op.is_no_grad and any(value.needs_grad for value in op.outputs)
    return use.user == "output"


def buckets(found: Mapping[str, tuple[Conversion, ...]]) -> tuple[tuple[Conversion, ...], ...]:
    """Those of the `found` conversions that do something, in the groups in which they are made; most are alone.

    Whole parameters that split compute reads (every step I -> R) move nothing in forward and have their gradients
    all-reduced in backward: those of one type and one pair of layouts do it together, in order of first use, in buckets
    that are full with BUCKET_BYTES; a parameter that fills one is alone in it.
    """
    groups: list[list[Conversion]] = []
    filling: dict[tuple, list[Conversion]] = {}
    for conversion in (conversion for of_value in found.values() for conversion in of_value):
        if conversion.src == conversion.dst:
            continue
        if not conversion.is_bucketed or conversion.latency_share == 1.0:
            groups.append([conversion])
            continue
        key = conversion.value.dtype, conversion.src, conversion.dst
        bucket = filling.get(key)
        if bucket is None or sum(member.value.num_bytes for member in bucket) >= BUCKET_BYTES:
            bucket = filling[key] = []
            groups.append(bucket)
        bucket.append(conversion)
    return tuple(map(tuple, groups))


def latency_share(value: Value) -> float:
    """What part of a bucket's latency the gradient of parameter `value` is priced at: its share of a full bucket.

    So the price of a gradient does not depend on the others. All but the last bucket of a type and a pair of layouts
    hold at least BUCKET_BYTES, so what they cost is at most one latency more.
    """
    return min(1.0, value.num_bytes / BUCKET_BYTES)


def _only_reduces_gradient(conversion: Conversion) -> bool:
    steps = redistribute(conversion.src, conversion.dst)
    return conversion.value.needs_grad and bool(steps) and all((step.src, step.dst) == (I, R) for step in steps)
