"""`Assignment`, all decisions about a graph, and the conversions that follow from it, for pricing and lowering."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autopar.ir.graph import Graph, Use, Value
from autopar.sbp.placement import I, Layout, Placement, R
from autopar.sbp.redistribute import redistribute
from autopar.sbp.signature import Strategy

# The size of a gradient bucket, the default of DistributedDataParallel (bucket_cap_mb).
BUCKET_BYTES = 25 * 2**20


# What the names in a field of an assignment are names of.
OP, INPUT, KEPT, OUTPUT = "op", "input", "kept", "output"
_NAMES = "names"  # the key of a field's metadata that says which


def _of(subject: str, **default: Any) -> Any:
    return field(metadata={_NAMES: subject}, **default)


@dataclass(frozen=True, slots=True)
class InBucket:
    """A parameter's place in a bucket: number `place` of those that have `num_bytes` together, whole.

    `is_prefetched`: whether the bucket is gathered while the ops before its first reader are computed, and its
    gradients are reduced while backward goes on.
    """

    num_bytes: int
    place: int
    is_prefetched: bool = False

    def share_of(self, value: Value) -> float:
        """The share of a parameter in the bytes of its bucket; 1 where no parameter has elements."""
        return value.num_bytes / self.num_bytes if self.num_bytes else 1.0


@dataclass(frozen=True)
class Assignment:
    """All that a plan decides about the ops and values of a graph.

    `strategies`: op name -> strategy. `layouts`: input value name -> layout in which it is stored or given. `kept`:
    name of a value with several uses -> layout to which it is converted once, and from which it is converted for each
    use. `outputs`: output value name -> layout. `regathered`: parameters that are not kept in the layout of their only
    reader, but converted again for its backward (unless its role forbids it). `recomputed`: regions, each the names of
    consecutive ops, of which only the inputs are kept for backward. `offloaded`: regions whose saved activations wait
    in the host's memory; a recomputed region lies within one or outside all. `state_on_host`: names of the parameters
    whose optimizer state is on the host except during their update. `parameter_buckets`: parameters that are gathered,
    and whose gradients are reduced, together with the others of their bucket, as far as these make the same change
    (`buckets`).

    A field is a mapping from names, a set of names, or groups of names; the methods hold for any field of these three
    forms.
    """

    strategies: Mapping[str, Strategy] = _of(OP)
    layouts: Mapping[str, Layout] = _of(INPUT)
    kept: Mapping[str, Layout] = _of(KEPT)
    outputs: Mapping[str, Layout] = _of(OUTPUT)
    regathered: frozenset[str] = _of(INPUT, default=frozenset())
    recomputed: tuple[tuple[str, ...], ...] = _of(OP, default=())
    offloaded: tuple[tuple[str, ...], ...] = _of(OP, default=())
    state_on_host: frozenset[str] = _of(INPUT, default=frozenset())
    parameter_buckets: Mapping[str, InBucket] = _of(INPUT, default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> "Assignment":
        """The assignment for a graph in which op or value `name` is called `names[name]`."""
        return self._changed(lambda _, choices: {names[name]: choice for name, choice in choices.items()})

    def restricted(self, graph: Graph) -> "Assignment":
        """The choices about ops and values of `graph`, in its order; of a group the names that it has."""
        known = graph.once(names_of)
        return self._changed(lambda of, choices: {name: choices[name] for name in known[of] if name in choices})

    def expanded(self, known: "Names", classes: Mapping[str, Mapping[str, str]]) -> "Assignment":
        """The choices of each class for all its members, the `known` names of a graph.

        classes: OP, INPUT, KEPT or OUTPUT -> name -> the class's name, which is that of a member.
        """

        def chosen(of: str, choices: Mapping[str, Any]) -> dict[str, Any]:
            if not choices:
                return {}
            own = classes[of]
            by_class = {own[name]: choice for name, choice in choices.items()}
            by_class |= {name: choice for name, choice in choices.items() if own[name] == name}
            return {name: by_class[key] for name in known[of] if (key := own[name]) in by_class}

        return self._changed(chosen)

    def merged(self, other: "Assignment", where: Collection[str]) -> "Assignment":
        """These choices, but those of `other` for the names in `where`."""
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return Assignment(*(_merged(here, there, where) for here, there in pairs))

    def on_axes(self, axes: Iterable[int]) -> "Assignment":
        """The choices for a mesh on whose axis number i each op and value has what it has here on axis `axes[i]`."""
        axes = tuple(axes)
        return self._changed(lambda _, choices: {name: _on_axes(choice, axes) for name, choice in choices.items()})

    def key(self, numbers: Mapping[str, Hashable]) -> Hashable:
        """A key that is equal for equal choices on isomorphic graphs; `numbers`: name -> its number in its graph."""
        decisions = (_choices(getattr(self, each.name)) for each in fields(self))
        return tuple(frozenset((numbers[name], choice) for name, choice in choices.items()) for choices in decisions)

    def chosen(self, *of: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Each field of names `of` these kinds, with its choices by name; of a group only that a name is in one."""
        for each in fields(self):
            if each.metadata[_NAMES] in of:
                value = getattr(self, each.name)
                yield each.name, value if isinstance(value, Mapping) else dict.fromkeys(_choices(value), True)

    @property
    def regions(self) -> Iterator[tuple[str, ...]]:
        """All groups of ops of all fields."""
        values = (getattr(self, each.name) for each in fields(self) if each.metadata[_NAMES] == OP)
        return (region for value in values if isinstance(value, tuple) for region in value)

    def _changed(self, change: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> "Assignment":
        """Each field with what `change` makes of its kind of names and its choices by name."""
        pairs = [(each.metadata[_NAMES], getattr(self, each.name)) for each in fields(self)]
        return Assignment(*(_formed(value, change(of, _choices(value))) for of, value in pairs))


NO_CHOICES = Assignment({}, {}, {}, {})


def without_prefetch(assignment: Assignment) -> Assignment:
    """`assignment` for a program that gathers most parameters before it runs, once for several runs."""
    places = assignment.parameter_buckets.items()
    return replace(assignment, parameter_buckets={name: replace(place, is_prefetched=False) for name, place in places})


def _choices(value: Any, *source: Hashable) -> Mapping[str, Any]:
    """A field as name -> choice; that of a member of a group is `source`, the group's number, and its place there."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, frozenset):
        return dict.fromkeys(value, True)
    return {name: (*source, number, place) for number, group in enumerate(value) for place, name in enumerate(group)}


def _formed(like: Any, choices: Mapping[str, Any]) -> Any:
    """A field of the form that `like` has, of `choices` by name; inverse of `_choices`.

    Where a place in a group does not come later than the one before it, the next copy of the group begins.
    """
    if isinstance(like, Mapping):
        return dict(choices)
    if isinstance(like, frozenset):
        return frozenset(choices)
    groups: list[list[str]] = []
    latest: dict[Hashable, tuple[int, list[str]]] = {}  # group -> the last place in its last copy, and that copy
    for name, (*source, place) in choices.items():
        last, copy = latest.get(tuple(source), (place, []))
        if place <= last:
            copy = []
            groups.append(copy)
        copy.append(name)
        latest[tuple(source)] = place, copy
    return tuple(map(tuple, groups))


def _merged(here: Any, there: Any, where: Collection[str]) -> Any:
    mine, theirs = _choices(here, 0), _choices(there, 1)
    kept = {name: choice for name, choice in mine.items() if name not in where}
    return _formed(here, kept | {name: choice for name, choice in theirs.items() if name in where})


def _on_axes(choice: Any, axes: tuple[int, ...]) -> Any:
    if isinstance(choice, Strategy):
        return Strategy(tuple(choice.signatures[axis] for axis in axes))
    is_layout = isinstance(choice, tuple) and all(isinstance(part, Placement) for part in choice)
    return tuple(choice[axis] for axis in axes) if is_layout else choice


# OP, INPUT, KEPT or OUTPUT -> the names of that kind, in graph order.
Names = Mapping[str, tuple[str, ...]]


def names_of(graph: Graph) -> Names:
    """The names that may occur in the fields of assignments of `graph`."""
    return {
        OP: tuple(op.name for op in graph.ops),
        INPUT: tuple(item.value.name for item in graph.inputs),
        KEPT: tuple(name for name, uses in graph.uses.items() if len(uses) > 1),
        OUTPUT: tuple(value.name for value in graph.placed_outputs),
    }


def graph_names(graph: Graph) -> Iterator[str]:
    """The names of inputs, ops and values in an order common to isomorphic graphs.

    An op and a value may share a name.
    """
    yield from (item.value.name for item in graph.inputs)
    for op in graph.ops:
        yield op.name
        yield from (value.name for value in op.outputs)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of `value` from layout `src` to `dst` for `uses`: for one use, or to the kept layout for all.

    `value.needs_grad`: whether a gradient is propagated back through it, which is not so if no reader has one.
    `is_bucketed`: whether it only reduces a parameter's gradient, in a bucket. `is_regathered`: whether its result is
    not kept for backward, but made again, in recomputed region number `region` or by itself (-1). `in_bucket`: the
    place of a parameter that is gathered, or has its gradient reduced, in a bucket.
    """

    value: Value
    src: Layout
    dst: Layout
    uses: tuple[Use, ...]
    is_bucketed: bool = False
    is_regathered: bool = False
    region: int = -1
    in_bucket: InBucket | None = None

    @property
    def latency_share(self) -> float:
        """The share of a collective's latency that it is priced at."""
        if self.in_bucket is not None:
            return self.in_bucket.share_of(self.value)
        return latency_share(self.value) if self.is_bucketed else 1.0

    @property
    def is_copied(self) -> bool:
        """Whether it is copied into a bucket's tensor and out of the result; a reduced gradient stays there."""
        return self.in_bucket is not None and not self.is_bucketed

    @property
    def is_prefetched(self) -> bool:
        """Whether it is gathered ahead of its first use; a recomputed region gathers where it reads."""
        return self.in_bucket is not None and self.in_bucket.is_prefetched and self.is_copied and self.region < 0


def produced_layouts(graph: Graph, assignment: Assignment) -> dict[str, Layout]:
    """Name of each value -> the layout in which it is produced."""
    layouts = {item.value.name: assignment.layouts[item.value.name] for item in graph.inputs}
    for op in graph.ops:
        for index, value in enumerate(op.outputs):
            layouts[value.name] = assignment.strategies[op.name].output_layout(index)
    return layouts


def written_buffer(graph: Graph, index: int) -> str:
    """The name of the input value to which mutation number `index` writes back."""
    fqn = graph.mutations[index][0]
    kinds = "parameter", "buffer"
    return next(item.value.name for item in graph.inputs if item.kind in kinds and item.fqn == fqn)


def wanted_layout(graph: Graph, assignment: Assignment, use: Use) -> Layout:
    """The layout in which a use reads its value."""
    if use.user == "output" and (argument := dict(graph.carried).get(use.slot)) is not None:
        return assignment.layouts[argument]
    if use.user == "output":
        return assignment.outputs[graph.outputs[use.slot].name]
    if use.user == "buffer":
        return assignment.layouts[written_buffer(graph, use.slot)]
    return assignment.strategies[use.user].input_layout(use.slot)


def conversions(
    graph: Graph, assignment: Assignment, names: Iterable[str] | None = None
) -> dict[str, tuple[Conversion, ...]]:
    """Name of each value that is read -> its conversions, in order; `names`: of these values only.

    With several uses, the first conversion is to the kept layout for all of them, the others from there for each use; a
    single use is converted from the layout in which the value is produced. Uses share nothing but the kept copy, so
    that the cost of each depends on one pair of layouts. A conversion with `src == dst` does nothing and is listed too.
    """
    giving, sources = graph.once(gradient_givers), graph.once(_sources)
    regions = {name: number for number, region in enumerate(assignment.recomputed) for name in region}
    conversions_by_name: dict[str, tuple[Conversion, ...]] = {}
    for name in graph.uses if names is None else names:
        uses, (value, maker, index, is_parameter) = graph.uses[name], sources[name]
        produced = assignment.layouts[name] if maker is None else assignment.strategies[maker].output_layout(index)
        wanted = [(wanted_layout(graph, assignment, use), (use,)) for use in uses]
        kept = assignment.kept.get(name, produced) if len(uses) > 1 else produced
        ways = [(produced, kept, tuple(uses))] if len(uses) > 1 else []
        ways += [(kept, dst, use) for dst, use in wanted]
        made = [Conversion(_as_read(value, served, giving), src, dst, served) for src, dst, served in ways]
        if is_parameter and _only_reduces_gradient(made[0]):
            made[0] = replace(made[0], is_bucketed=True)
        elif name in assignment.regathered and len(uses) == 1 and _is_run_as_it_is(assignment, uses[0]):
            made[0] = replace(made[0], is_regathered=True, region=regions.get(uses[0].user, -1))
        if name in assignment.parameter_buckets and (made[0].is_bucketed or only_gathers(made[0].src, made[0].dst)):
            made[0] = replace(made[0], in_bucket=assignment.parameter_buckets[name])
        conversions_by_name[name] = tuple(made)
    return conversions_by_name


def _sources(graph: Graph) -> dict[str, tuple[Value, str | None, int, bool]]:
    """Name of each value -> (the value, the op that makes it, as which output, whether it is a parameter)."""
    sources: dict[str, tuple[Value, str | None, int, bool]] = {
        item.value.name: (item.value, None, 0, item.kind == "parameter") for item in graph.inputs
    }
    for op in graph.ops:
        sources.update((value.name, (value, op.name, index, False)) for index, value in enumerate(op.outputs))
    return sources


def _is_run_as_it_is(assignment: Assignment, use: Use) -> bool:
    """Whether a use is by an op of whose parameters autograd saves what it saves of the op itself."""
    strategy = assignment.strategies.get(use.user)
    return strategy is not None and all(signature.saves_as_op for signature in strategy.signatures)


def _as_read(value: Value, uses: Iterable[Use], giving: Collection[str]) -> Value:
    """`value`, with a gradient only if one of `uses` is `giving` one back."""
    gives = value.needs_grad and any(use.user in giving for use in uses)
    return value if gives == value.needs_grad else replace(value, needs_grad=gives)


def gradient_givers(graph: Graph) -> set[str]:
    """The users (`Use.user`) that propagate a gradient back to a value that they read, if that needs one."""
    givers = {op.name for op in graph.ops if not op.is_no_grad and any(value.needs_grad for value in op.outputs)}
    return givers | {"output"}


def buckets(
    by_name: Mapping[str, tuple[Conversion, ...]], *, across_blocks: bool = True
) -> tuple[tuple[Conversion, ...], ...]:
    """The `by_name` conversions that are not empty, grouped as they are issued; most groups have one.

    Parameters of one bucket that are gathered on the same axes share an all-gather, and their gradients a
    reduce-scatter, if the bucket is prefetched, or if all are gathered for good or all again in the same region. Whole
    parameters that split compute reads (every step I -> R) move nothing in forward; those of one bucket and one pair of
    layouts share an all-reduce of their gradients. All are of one dtype, also of their sums. A new copy of a bucket
    begins where a place does not come later than the one before.

    Whole parameters of no bucket share an all-reduce in order of first use, up to BUCKET_BYTES; a parameter that fills
    a bucket is alone in it. `across_blocks`: whether there are such buckets, which do not end with a block.
    """
    groups: list[list[Conversion]] = []
    filling: dict[tuple, list[Conversion]] = {}
    for conversion in (conversion for of_value in by_name.values() for conversion in of_value):
        if conversion.src == conversion.dst:
            continue
        key = _bucket_key(conversion, across_blocks)
        bucket = filling.get(key)
        if bucket is None or not key or _is_full(bucket, conversion):
            bucket = filling[key] = []
            groups.append(bucket)
        bucket.append(conversion)
    return tuple(map(tuple, groups))


def _bucket_key(conversion: Conversion, across_blocks: bool) -> tuple[Hashable, ...]:
    """The key that the conversions of a bucket have in common; () of one that is issued by itself."""
    value, place = conversion.value, conversion.in_bucket
    if place is not None and not conversion.is_bucketed:
        (step,) = redistribute(conversion.src, conversion.dst)
        kind = value.dtypes, value.needs_grad, place.num_bytes
        is_again = conversion.is_regathered and not conversion.is_prefetched
        return *kind, conversion.is_prefetched, step.axes, step.dst.kind, is_again, conversion.region
    if conversion.is_bucketed and conversion.latency_share < 1.0 and (across_blocks or place is not None):
        return value.dtypes, value.needs_grad, conversion.src, conversion.dst, place and place.num_bytes
    return ()


def _is_full(bucket: list[Conversion], following: Conversion) -> bool:
    """Whether `following`, of the same kind, begins a new bucket."""
    last, place = bucket[-1].in_bucket, following.in_bucket
    if last is not None and place is not None:
        return place.place <= last.place
    return sum(member.value.num_bytes for member in bucket) >= BUCKET_BYTES


def latency_share(value: Value) -> float:
    """The share of a bucket's latency that the gradient of parameter `value` is priced at: its share of a full bucket.

    So the price of a gradient does not depend on the others. All buckets of a dtype and a pair of layouts but the last
    have at least BUCKET_BYTES, so that their cost is at most one latency more.
    """
    return min(1.0, value.num_bytes / BUCKET_BYTES)


def only_gathers(src: Layout, dst: Layout) -> bool:
    """Whether one step of all-gathers leads from `src` to `dst`."""
    steps = redistribute(src, dst)
    return len(steps) == 1 and steps[0].src.is_split and steps[0].dst.kind in "IR"


def _only_reduces_gradient(conversion: Conversion) -> bool:
    steps = redistribute(conversion.src, conversion.dst)
    return conversion.value.needs_grad and bool(steps) and all((step.src, step.dst) == (I, R) for step in steps)
