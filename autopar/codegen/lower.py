"""`lower`: one rank's program of an assignment, with local sizes, and each conversion just before its first use."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from autopar.codegen.liveness import with_releases
from autopar.codegen.prefetch import with_starts
from autopar.codegen.program import (
    AnyStep,
    Call,
    Convert,
    ConvertTogether,
    Gather,
    Gathered,
    OffloadedRegion,
    Program,
    RecomputedRegion,
    RegatheredOperand,
    Variable,
    flat,
    reads,
    writes,
)
from autopar.costmodel.activations.autograd_footprint import footprint
from autopar.ir.graph import Graph, Op, Slot, Use, Value
from autopar.ir.op_facts import is_random
from autopar.mesh import Mesh
from autopar.sbp.assignment import Assignment, Conversion, buckets, conversions, wanted_layout, without_prefetch
from autopar.sbp.localize import localize
from autopar.sbp.placement import I, Layout
from autopar.sbp.redistribute import LayoutStep, live_axes, redistribute
from autopar.sbp.signature import Strategy
from autopar.sbp.uneven.parts import PartSize, part_size


def lower(
    graph: Graph,
    mesh: Mesh,
    assignment: Assignment,
    *,
    is_split: bool = False,
    alike: Collection[str] = (),
    in_buckets: bool = True,
    is_halved: bool = False,
) -> Program:
    """The program of one rank for `graph` under `assignment`.

    `is_split`: a part of its own, `Program.gather`, converts the parameters once for many runs of the rest; regathered
    parameters are converted in each run. `alike`: random ops that draw the same numbers in each run of a step.
    `in_buckets`: whether gradients are reduced in buckets of several blocks. `is_halved`: whether weights get their
    gradients later than what the stage receives (`Variable.is_view`).
    """
    if is_split:
        assignment = without_prefetch(assignment)
    lowering = _Lowering(graph, mesh, assignment, alike, in_buckets, is_halved)
    gather = lowering.gather() if is_split else None
    for number, ops in groupby(graph.ops, key=_number_of(assignment.offloaded)):
        lowering.offload(number, tuple(ops))
    outputs = tuple(lowering.output(index, value) for index, value in enumerate(graph.outputs))
    mutations = tuple((fqn, lowering.read(value, Use("buffer", i))) for i, (fqn, value) in enumerate(graph.mutations))
    inputs = tuple((item, assignment.layouts[item.value.name]) for item in graph.inputs)
    kept_alive = {v.name for v, _ in outputs if isinstance(v, Variable)} | {name for _, name in mutations}
    steps = with_releases(with_starts(lowering.steps, lowering.regathered_buckets), kept_alive)
    return Program(mesh, inputs, steps, outputs, mutations, gather)


_Key = tuple[str, tuple[Use, ...]]  # of a conversion: the value's name and its uses


@dataclass
class _Lowering:
    """A walk over the graph, with the steps emitted so far."""

    graph: Graph
    mesh: Mesh
    assignment: Assignment
    alike: Collection[str]
    in_buckets: bool
    is_halved: bool
    steps: list[AnyStep] = field(default_factory=list)
    num_random: int = 0
    is_in_region: bool = False

    def __post_init__(self) -> None:
        self._conversions = conversions(self.graph, self.assignment)
        together = buckets(self._conversions, across_blocks=self.in_buckets)
        self._buckets = {_key(member): bucket for bucket in together for member in bucket}
        self._regathered: dict[_Key, int] = {}  # conversion -> number of the bucket that backward gathers again
        self._num_buckets = 0
        # conversion -> variable that holds its result
        self._converted: dict[_Key, str] = {}
        self._steps_of: dict[_Key, list[Convert]] = {}
        self._num_copies: dict[str, int] = {}
        self._taken = {item.value.name for item in self.graph.inputs} | {
            value.name for op in self.graph.ops for value in op.outputs
        }
        self._of_inputs = {item.value.name for item in self.graph.inputs}  # and their converted copies
        self._parameters = {item.value.name for item in self.graph.of_kind("parameter")}
        self._of_received = _of_arguments(self.graph) if self.is_halved else frozenset()

    def gather(self) -> Gather:
        """The gather of the program: it converts the parameters for all their uses before the walk over the ops."""
        groups: dict[_Key, dict[str, Gathered]] = {}
        for name in (name for name in self._conversions if name in self._parameters):
            first, *rest = self._conversions[name]
            if first.is_regathered:
                groups[_key(first)] = {name: Gathered(name, first.value, first.src)}
                continue
            group = groups.setdefault(_key(self._buckets.get(_key(first), (first,))[0]), {})
            for conversion in rest or [first]:
                made = self._emit(conversion)
                group[made] = Gathered(made, conversion.value, conversion.dst)
        steps, self.steps = self.steps, []
        results = tuple(tuple(group.values()) for group in groups.values())
        kept_alive = {one.name for group in results for one in group}
        return Gather(with_releases(steps, kept_alive), results)

    def offload(self, number: int, ops: tuple[Op, ...]) -> None:
        """Emit `ops`; if they have a region `number`, their saved activations are offloaded."""
        if number >= 0:
            self._convert_parameters(ops)
        before, self.steps = self.steps, []
        for region, run in groupby(ops, key=_number_of(self.assignment.recomputed)):
            self._region(region, tuple(run))
        inside, self.steps = self.steps, before
        if number >= 0:
            read, made = ({name for step in flat(inside) for name in names(step)} for names in (reads, writes))
            inside = [OffloadedRegion(number, tuple(sorted(read & self._of_inputs - made)), tuple(inside))]
        self.steps += inside

    def _region(self, number: int, ops: tuple[Op, ...]) -> None:
        """Emit `ops`; if they have a region `number`, backward runs them and their conversions again."""
        if number < 0:
            return self._calls(ops)
        self._convert_parameters(ops)
        before, self.steps, self.is_in_region = self.steps, [], True
        self._calls(ops)
        inside, self.steps, self.is_in_region = tuple(self.steps), before, False
        self.steps.append(RecomputedRegion(number, (), (), inside))

    def _convert_parameters(self, ops: tuple[Op, ...]) -> None:
        """Convert the parameters that `ops` read and that are not regathered."""
        for op in ops:
            for slot, value in enumerate(op.inputs):
                if value.name in self._parameters and not self._conversions[value.name][0].is_regathered:
                    self.read(value, Use(op.name, slot))

    def _calls(self, ops: tuple[Op, ...]) -> None:
        for op in ops:
            self._call(op)

    def read(self, value: Value, use: Use) -> str:
        """The variable that holds `value` in the layout of `use`; emits the conversions still missing."""
        return self._emit(next(c for c in reversed(self._conversions[value.name]) if use in c.uses))

    def _emit(self, conversion: Conversion) -> str:
        if _key(conversion) not in self._converted:
            bucket = self._buckets.get(_key(conversion), (conversion,))
            sources = [self._source(member) for member in bucket]
            for steps in zip(*(redistribute(member.src, member.dst) for member in bucket), strict=True):
                if axes := live_axes(steps[0].axes, self.mesh.shape):
                    sources = self._step(steps, axes, bucket, sources)
            self._converted.update({_key(member): source for member, source in zip(bucket, sources)})
        return self._converted[_key(conversion)]

    def _source(self, conversion: Conversion) -> str:
        """The variable that holds the source of a conversion: the value as produced, or its kept copy."""
        name = conversion.value.name
        first = self._conversions[name][0]
        return name if conversion is first else self._emit(first)

    def _step(
        self, steps: tuple[LayoutStep, ...], axes: tuple[int, ...], bucket: tuple[Conversion, ...], sources: list[str]
    ) -> list[str]:
        """Emit a step of each member of a bucket; the variables that hold the results."""
        values = tuple(member.value for member in bucket)
        copies = [self._copy_of(value.name) for value in values]
        self._of_inputs.update(copy for copy, source in zip(copies, sources) if source in self._of_inputs)
        is_prefetched = bucket[0].is_prefetched
        if len(bucket) == 1 and not is_prefetched:
            (step,) = steps
            extent = _extent(step, values[0], self.mesh.shape)
            convert = Convert(copies[0], sources[0], values[0], axes, step.src, step.dst, step.after, extent)
            self.steps.append(convert)
            self._steps_of.setdefault(_key(bucket[0]), []).append(convert)
        else:
            src, dst, after = zip(*((step.src, step.dst, step.after) for step in steps), strict=True)
            again = [member for member in bucket if member.is_regathered and not self.is_in_region]
            number = self._number_bucket() if again or is_prefetched else -1
            self._regathered.update((_key(member), number) for member in again)
            extents = tuple(_extent(step, value, self.mesh.shape) for step, value in zip(steps, values))
            ends = tuple(sources), values, axes, src, dst, after, extents if any(extents) else ()
            self.steps.append(ConvertTogether(tuple(copies), *ends, number, is_prefetched))
        return copies

    def _number_bucket(self) -> int:
        self._num_buckets += 1
        return self._num_buckets - 1

    @property
    def regathered_buckets(self) -> frozenset[int]:
        """The numbers of the buckets that backward gathers again."""
        return frozenset(self._regathered.values())

    def _copy_of(self, name: str) -> str:
        """A fresh variable for a converted copy of the value called `name`."""
        number = self._num_copies.get(name, 0) + 1
        while (copy := f"{name}__{number}") in self._taken:
            number += 1
        self._num_copies[name] = number
        self._taken.add(copy)
        return copy

    def _again(self, op: Op, names: list[str]) -> Iterator[RegatheredOperand]:
        """The operands that are regathered for backward; within a region they are recomputed with it."""
        if self.is_in_region or not any(self._conversions[value.name][-1].is_regathered for value in op.inputs):
            return
        for slot in sorted(footprint(op).saved_inputs):
            conversion = self._conversions[op.inputs[slot].name][-1]
            key = _key(conversion)
            steps = self._steps_of.get(key)
            if key in self._regathered:
                place, source = self._buckets[key].index(conversion), self._source(conversion)
                yield RegatheredOperand(names[slot], source, (), self._regathered[key], place)
            elif conversion.is_regathered and steps:
                yield RegatheredOperand(names[slot], steps[0].source, tuple(steps))

    def _call(self, op: Op) -> None:
        strategy = self.assignment.strategies[op.name]
        names = [self.read(value, Use(op.name, slot)) for slot, value in enumerate(op.inputs)]
        operands = tuple((name, strategy.input_layout(slot)) for slot, name in enumerate(names))
        args, kwargs = localize(op, strategy, self.mesh.shape)
        layouts = tuple(strategy.output_layout(i) for i in range(len(op.outputs)))
        random, split_axes = -1, ()
        if is_random(op):
            random, self.num_random = self.num_random, self.num_random + 1
            split_axes = tuple(axis for axis, placement in enumerate(layouts[0]) if placement.is_split)
        read = [Variable(name, self._has_own_view(op, value)) for name, value in zip(names, op.inputs, strict=True)]
        kwargs = tuple((key, _fill(item, read)) for key, item in kwargs)
        origin = " ".join(filter(None, (op.module, op.line)))
        self.steps.append(
            Call(
                op.outputs,
                op.target,
                _fill(args, read),
                kwargs,
                operands,
                layouts,
                _roles(strategy),
                random,
                split_axes,
                op.is_no_grad and any(value.needs_grad for value in op.inputs),
                op.is_tuple,
                origin,
                tuple(self._again(op, names)),
                op.name in self.alike,
            )
        )

    def _has_own_view(self, op: Op, value: Value) -> bool:
        """Whether `op` sends gradients to what the stage receives and apart from it to weights, by way of `value`."""
        is_met = any(out.name in self._of_received for out in op.outputs)
        return is_met and value.needs_grad and value.name not in self._of_received

    def output(self, index: int, value: Any) -> tuple[Any, Layout]:
        if not isinstance(value, Value):
            return value, ()
        use = Use("output", index)
        return Variable(self.read(value, use)), wanted_layout(self.graph, self.assignment, use)


def _number_of(regions: tuple[tuple[str, ...], ...]) -> Callable[[Op], int]:
    """The function from an op to the number of its region, -1 outside of all."""
    numbers = {name: number for number, region in enumerate(regions) for name in region}
    return lambda op: numbers.get(op.name, -1)


def _extent(step: LayoutStep, value: Value, mesh_shape: tuple[int, ...]) -> int | None:
    """The size of the dim that a step joins or splits anew, on all its axes together; None if its parts are equal."""
    dim = step.src.dim
    if not step.src.is_split or not isinstance(part_size(value.shape[dim], dim, step.layout, mesh_shape), PartSize):
        return None
    outside = tuple(I if axis in step.axes else placement for axis, placement in enumerate(step.layout))
    return part_size(value.shape[dim], dim, outside, mesh_shape)


def _key(conversion: Conversion) -> _Key:
    """The identity of a conversion among those of a graph."""
    return conversion.value.name, conversion.uses


def _of_arguments(graph: Graph) -> frozenset[str]:
    """The values whose gradient goes on to arguments."""
    found = {item.value.name for item in graph.of_kind("argument") if item.value.needs_grad}
    for op in graph.ops:
        if any(value.name in found for value in op.inputs):
            found.update(value.name for value in op.outputs if value.needs_grad)
    return frozenset(found)


def _fill(args: Any, operands: list[Variable]) -> Any:
    if isinstance(args, Slot):
        return operands[args.index]
    if isinstance(args, (tuple, list)):
        return tuple(_fill(item, operands) for item in args)
    return args


def _roles(strategy: Strategy) -> tuple[tuple[str, tuple[int, ...]], ...]:
    axes: dict[str, list[int]] = {}
    for axis, signature in enumerate(strategy.signatures):
        if signature.role:
            axes.setdefault(signature.role, []).append(axis)
    return tuple((role, tuple(own)) for role, own in axes.items())
