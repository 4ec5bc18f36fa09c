"""An assignment says where everything is; the conversions between its layouts follow from it, for pricing and for lowering alike."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Op, Value
from autopar.sbp.placement import I, Layout, R
from autopar.sbp.redistribute import redistribute
from autopar.sbp.signature import Strategy

# Gradients are reduced together up to this many bytes, as DistributedDataParallel does by default (its bucket_cap_mb).
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Assignment:
    """strategies: op name -> strategy. layouts: input value name -> layout stored or handed in. kept: name of a value with
    several uses -> the layout it is converted to once, from which each use is served. outputs: output value name -> layout it leaves in.
    """

    strategies: Mapping[str, Strategy]
    layouts: Mapping[str, Layout]
    kept: Mapping[str, Layout]
    outputs: Mapping[str, Layout]


@dataclass(frozen=True, slots=True)
class Use:
    """One reading of a value: slot `slot` of op `user`; a graph output (user "output") or a buffer's write-back ("buffer")."""

    user: str
    slot: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """`value` in layout `src` is turned into `dst` once, for `uses` (empty: only further conversions start from it).

    `value.needs_grad` says whether a gradient comes back this way: none does where all that read it have none themselves.
    """

    value: Value
    src: Layout
    dst: Layout
    uses: tuple[Use, ...]


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


def wanted_layout(graph: Graph, assignment: Assignment, use: Use) -> Layout:
    """Layout in which a use reads its value."""
    if use.user == "output":
        return assignment.outputs[graph.outputs[use.slot].name]
    if use.user == "buffer":
        fqn = graph.mutations[use.slot][0]
        return next(assignment.layouts[item.value.name] for item in graph.inputs if item.kind == "buffer" and item.fqn == fqn)
    return assignment.strategies[use.user].input_layout(use.slot)


def conversions(graph: Graph, assignment: Assignment) -> dict[str, tuple[Conversion, ...]]:
    """For each value, its conversions in order: to the kept layout, then from there one per distinct layout wanted.

    A use that wants the layout in which the value came into being reads it as it is. A conversion with `src == dst` does
    nothing and is listed so that each use occurs once.
    """
    produced, ops = produced_layouts(graph, assignment), {op.name: op for op in graph.ops}
    values = {item.value.name: item.value for item in graph.inputs} | {v.name: v for op in graph.ops for v in op.outputs}
    found: dict[str, tuple[Conversion, ...]] = {}
    for name, uses in uses_of(graph).items():
        by_layout: dict[Layout, list[Use]] = defaultdict(list)
        for use in uses:
            by_layout[wanted_layout(graph, assignment, use)].append(use)
        needs_base = any(dst != produced[name] for dst in by_layout)
        base = assignment.kept.get(name, produced[name]) if needs_base else produced[name]
        rest = [
            Conversion(_as_read(values[name], served, ops), dst if dst == produced[name] else base, dst, tuple(served))
            for dst, served in by_layout.items()
        ]
        from_base = [use for conversion in rest if conversion.src == base for use in conversion.uses]
        first = [Conversion(_as_read(values[name], from_base, ops), produced[name], base, ())] if base != produced[name] else []
        found[name] = tuple(first + rest)
    return found


def _as_read(value: Value, uses: Iterable[Use], ops: Mapping[str, Op]) -> Value:
    """`value`, with a gradient if it gets one from any of `uses`."""
    return replace(value, needs_grad=value.needs_grad and any(gives_gradient(use, ops) for use in uses))


def gives_gradient(use: Use, ops: Mapping[str, Op]) -> bool:
    """Whether a gradient can come back from a reading of a value that needs one; `ops` by name."""
    if use.user in ops:
        op = ops[use.user]
        return not op.is_no_grad and any(value.needs_grad for value in op.outputs)
    return use.user == "output"


def buckets(graph: Graph, found: Mapping[str, tuple[Conversion, ...]]) -> tuple[tuple[Conversion, ...], ...]:
    """Those of the `found` conversions that do something, in the groups in which they are made; most are alone.

    Whole parameters that split compute reads (every step I -> R) move nothing in forward and have their gradients all-reduced in
    backward: those of one type and one pair of layouts do it together, in order of first use, up to BUCKET_BYTES.
    """
    parameters = {item.value.name for item in graph.of_kind("parameter")}
    groups: list[list[Conversion]] = []
    filling: dict[tuple, list[Conversion]] = {}
    for conversion, produced in ((conversion, of_value[0].src) for of_value in found.values() for conversion in of_value):
        if conversion.src == conversion.dst:
            continue
        if conversion.value.name not in parameters or conversion.src != produced or not _only_reduces_gradient(conversion):
            groups.append([conversion])
            continue
        key = conversion.value.dtype, conversion.src, conversion.dst
        bucket = filling.get(key)
        if bucket is None or sum(member.value.num_bytes for member in bucket) + conversion.value.num_bytes > BUCKET_BYTES:
            bucket = filling[key] = []
            groups.append(bucket)
        bucket.append(conversion)
    return tuple(map(tuple, groups))


def _only_reduces_gradient(conversion: Conversion) -> bool:
    steps = redistribute(conversion.src, conversion.dst)
    return conversion.value.needs_grad and bool(steps) and all((step.src, step.dst) == (I, R) for step in steps)
