"""The content of `explain` for a plan without stages, as data for text and JSON."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

from autopar.costmodel.collective_time import algorithm_over_levels
from autopar.costmodel.conversion_cost import conversion_times
from autopar.costmodel.evaluate import Costs, PlannedCollective
from autopar.costmodel.roofline import op_time
from autopar.explain.batch_size import notes
from autopar.explain.common_text import origin_of_figures
from autopar.explain.group_rows import GroupRow, group_rows
from autopar.explain.precision_text import Precision, precision_of
from autopar.explain.stayed_whole import WholeRow, stayed_whole
from autopar.ir.op_facts import family, is_view
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.plans.serialise import HandCosts
from autopar.sbp.placement import I, Layout, format_layout, is_even, local_shape
from autopar.sbp.redistribute import Collective


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A row of `count` equal collectives of a step, of an op and its copies; `time_s`: of all of them.

    `algorithm`: of one over several link levels, otherwise "".
    """

    phase: str
    kind: str
    axis: str
    num_bytes: int
    count: int
    time_s: float
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class OpRow:
    """A row of an op and its copies.

    `signatures`: one for each mesh axis, `collectives`: of its outputs, and inner ones.
    """

    name: str
    count: int
    target: str
    module: str
    line: str
    outputs: tuple[str, ...]
    signatures: tuple[str, ...]
    collectives: tuple[CollectiveRow, ...]

    @property
    def is_quiet_view(self) -> bool:
        """Whether the op is a view that follows its input without communication, which tables leave out."""
        return (is_view(self.target) or family(self.target) == "aten.clone") and not self.collectives


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row of a parameter, buffer, constant or argument and its copies.

    `collectives`: gathers of it and reductions of its gradient.
    """

    fqn: str
    count: int
    kind: str
    value: str
    layout: str
    collectives: tuple[CollectiveRow, ...]


@dataclass(frozen=True, slots=True)
class GatheredOutputs:
    """The `count` outputs that model(...) gathers, to give them whole, and train_step does not.

    `num_bytes`: of all on every device; `time_s`: of a call and its backward.
    """

    count: int
    num_bytes: int
    time_s: float


@dataclass(frozen=True)
class Report:
    """Everything that `explain` shows; `as_json` gives the same content.

    `state_on_host`: FQNs of parameters. `uneven`: tensors in parts of different sizes; `uneven_s`: seconds of a step
    that ops take longer on the largest of them than on equal parts. `is_from_file`: as in `Plan`.
    """

    mesh: str
    cluster: str
    cluster_source: str
    optimizer: str
    precision: Precision | None
    trains: bool
    ops: tuple[OpRow, ...]
    inputs: tuple[InputRow, ...]
    totals: tuple[CollectiveRow, ...]
    memory_bytes: Mapping[str, int]
    memory_limit_bytes: float | None
    peak_bytes: int | None
    state_on_host: tuple[str, ...]
    state_on_host_bytes: int
    time_s: Mapping[str, float]
    gathered_outputs: GatheredOutputs
    step_s: float
    lower_bound_s: float
    bound_of: str
    gap: float
    found_by: str
    notes: tuple[str, ...]
    groups: tuple[GroupRow, ...]
    hand: Mapping[str, HandCosts]
    meshes_s: Mapping[str, float]
    without_rule: Mapping[str, float]
    discovered: Mapping[str, str]
    not_divided: tuple[Mapping[str, Any], ...]
    uneven: tuple[str, ...]
    uneven_s: float
    stayed_whole: tuple[WholeRow, ...]
    timings_s: Mapping[str, float]
    is_from_file: bool

    def as_json(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers."""
        return asdict(self)


def report(plan: Plan) -> Report:
    """The report of a plan; nothing is priced again but what each group of unequal devices takes, and sums in
    another dtype.
    """
    costs = plan.costs
    return Report(
        mesh=str(plan.mesh),
        cluster=plan.cluster.name,
        cluster_source=origin_of_figures(plan.cluster),
        optimizer=plan.training.described,
        precision=precision_of(plan),
        trains=plan.training.trains,
        ops=tuple(_op_rows(plan)),
        inputs=tuple(_input_rows(plan)),
        totals=_totals(plan),
        memory_bytes=_of_the_kind(costs.memory_bytes, plan),
        memory_limit_bytes=None if plan.memory_limit_bytes == float("inf") else plan.memory_limit_bytes,
        peak_bytes=max(plan.peak_bytes, default=None),
        state_on_host=tuple(item.fqn for item in plan.graph.inputs if item.value.name in plan.assignment.state_on_host),
        state_on_host_bytes=costs.state_on_host_bytes,
        time_s=_of_the_kind(_times(costs), plan),
        gathered_outputs=_gathered_outputs(plan),
        step_s=costs.step_s,
        lower_bound_s=plan.lower_bound_s,
        bound_of=plan.bound_of,
        gap=plan.gap,
        found_by=plan.found_by,
        notes=notes(plan),
        groups=group_rows(plan),
        hand=dict(plan.hand),
        meshes_s=dict(plan.meshes),
        without_rule=dict(plan.without_rule),
        discovered=dict(_discovered(plan)),
        not_divided=tuple(_not_divided(plan)),
        uneven=tuple(_uneven(plan)),
        uneven_s=_uneven_s(plan),
        stayed_whole=stayed_whole(plan),
        timings_s=dict(plan.timings),
        is_from_file=plan.is_from_file,
    )


def _discovered(plan: Plan) -> Iterator[tuple[str, str]]:
    for name, found in plan.discovered.items():
        yield name, "; ".join(map(str, found.signatures)) or f"whole: {found.why}"


def _times(costs: Costs) -> dict[str, float]:
    return {
        "compute forward": costs.compute_forward_s,
        "compute backward": costs.compute_backward_s,
        "communication forward": costs.communication_s("forward"),
        "communication backward": costs.communication_s("backward"),
        **({"hidden behind compute": -costs.hidden_s} if costs.hidden_s else {}),
        "optimizer": costs.optimizer_s,
        **{
            f"exposed host transfers, {phase}": seconds
            for phase, seconds in costs.waiting_s.items()
            if costs.moved_bytes or seconds
        },
    }


def _of_the_kind(terms: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """`terms`, in inference without those of training, of which nothing is there."""
    return {name: size for name, size in terms.items() if size or plan.training.trains}


def _op_rows(plan: Plan) -> Iterator[OpRow]:
    counts = Counter(plan.folded.representative[op.name] for op in plan.graph.ops)
    collectives = _by_owner(plan)
    for op in plan.graph.ops:
        if plan.folded.representative[op.name] == op.name:
            signatures = tuple(map(str, plan.assignment.strategies[op.name].signatures))
            outputs = tuple(map(str, op.outputs))
            yield OpRow(
                op.name,
                counts[op.name],
                op.target,
                op.module,
                op.line,
                outputs,
                signatures,
                collectives.get(op.name, ()),
            )


def _input_rows(plan: Plan) -> Iterator[InputRow]:
    counts = Counter(plan.folded.representative[item.value.name] for item in plan.graph.inputs)
    collectives = _by_owner(plan)
    for item in plan.graph.inputs:
        name = item.value.name
        if plan.folded.representative[name] == name:
            layout = format_layout(plan.assignment.layouts[name]) + (
                " regathered" if name in plan.assignment.regathered else ""
            )
            layout += ", state on host" if name in plan.assignment.state_on_host else ""
            layout += ", in a bucket" if name in plan.assignment.parameter_buckets else ""
            value = str(item.value).partition(": ")[2]
            yield InputRow(item.fqn, counts[name], item.kind, value, layout, collectives.get(name, ()))


def _by_owner(plan: Plan) -> dict[str, tuple[CollectiveRow, ...]]:
    """Representative op or input -> the collectives on its values and those of its copies."""
    owners = {value.name: op.name for op in plan.graph.ops for value in op.outputs}
    by_owner: dict[str, list[PlannedCollective]] = {}
    for planned in plan.costs.collectives:
        owner = owners.get(planned.where, planned.where)
        by_owner.setdefault(plan.folded.representative[owner], []).append(planned)
    return {owner: collective_rows(planned, plan.costs, plan.mesh) for owner, planned in by_owner.items()}


def collective_rows(planned: Sequence[PlannedCollective], costs: Costs, mesh: Mesh) -> tuple[CollectiveRow, ...]:
    """Rows of equal collectives, forward first, otherwise in the order in which they are issued."""
    counts: Counter[Collective] = Counter()
    times: defaultdict[Collective, float] = defaultdict(float)
    for item in planned:
        counts[item.collective] += costs.num_issued(item)
        times[item.collective] += costs.num_issued(item) * item.time_s
    rows = [CollectiveRow(c.phase, c.kind, mesh.name_of(c.axes), c.num_bytes, counts[c], times[c]) for c in counts]
    return tuple(sorted(rows, key=lambda row: row.phase != "forward"))


def _totals(plan: Plan) -> tuple[CollectiveRow, ...]:
    """Rows of all collectives by phase, axes, kind and algorithm; `num_bytes` is the sum."""
    groups: dict[tuple[bool, tuple[int, ...], str, str], list[PlannedCollective]] = {}
    issued = plan.costs.num_issued
    for planned in plan.costs.collectives:
        c = planned.collective
        algorithm = algorithm_over_levels(plan.cluster, plan.mesh, c)
        groups.setdefault((c.phase == "backward", c.axes, c.kind, algorithm), []).append(planned)
    return tuple(
        CollectiveRow(
            "backward" if is_backward else "forward",
            kind,
            plan.mesh.name_of(axes),
            sum(issued(item) * item.collective.num_bytes for item in planned),
            sum(map(issued, planned)),
            sum(issued(item) * item.time_s for item in planned),
            algorithm,
        )
        for (is_backward, axes, kind, algorithm), planned in sorted(groups.items())
    )


def _gathered_outputs(plan: Plan) -> GatheredOutputs:
    whole, outputs = (I,) * plan.mesh.ndim, plan.assignment.outputs
    split = [x for x in plan.graph.placed_outputs if outputs[x.name] != whole]
    times = (conversion_times(x, (outputs[x.name],), (whole,), plan.mesh.shape, plan.cluster) for x in split)
    return GatheredOutputs(len(split), sum(x.num_bytes for x in split), sum(float(time.item()) for time in times))


def _not_divided(plan: Plan) -> Iterator[dict[str, Any]]:
    """A row for each dim that an axis does not divide, once for all copies, that of the most time first.

    `degrees`: the next sizes of an axis, below and above, that divide the dim. `time_s`: what an op and its copies
    would take less in a step if the axis split them, 0 if it splits them along another dim, or of a tensor.
    """
    yield from sorted(_undivided(plan), key=lambda row: -row["time_s"])


def _undivided(plan: Plan) -> Iterator[dict[str, Any]]:
    counts, ops = Counter(plan.folded.representative.values()), {op.name: op for op in plan.graph.ops}
    shapes = {op.name: op.outputs[0].shape if op.outputs else () for op in plan.graph.ops}
    shapes |= {item.value.name: item.value.shape for item in plan.graph.inputs}
    fqns = {item.value.name: item.fqn for item in plan.graph.inputs}
    for name, dim, axis in plan.not_divided:
        if plan.folded.representative[name] == name:
            size = shapes[name][dim] if dim < len(shapes[name]) else None
            degree, time_s = plan.mesh.shape[axis], 0.0
            if name in ops and not _splits(plan, name, axis):
                op_s = op_time(ops[name], plan.assignment.strategies[name], plan.mesh.shape, plan.cluster)
                time_s = plan.training.num_microbatches * counts[name] * sum(op_s) * (1 - 1 / degree)
            told = {"dim": dim, "size": size, "axis": plan.mesh.axis_names[axis], "time_s": time_s}
            yield {"name": fqns.get(name, f"%{name}"), **told, "degrees": nearest_degrees(size, degree)}


def _splits(plan: Plan, name: str, axis: int) -> bool:
    signature = plan.assignment.strategies[name].signatures[axis]
    return any(placement.kind not in "IR" for placement in (*signature.inputs, *signature.outputs))


def nearest_degrees(size: int | None, degree: int) -> tuple[int, ...]:
    """The next divisors of `size` below and above `degree`, which is none.

    >>> nearest_degrees(8, 3), nearest_degrees(25, 4), nearest_degrees(7, 8)
    ((2, 4), (1, 5), (7,))
    """
    if not size:
        return ()
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    return (*[n for n in divisors if n < degree][-1:], *[n for n in divisors if n > degree][:1])


def _uneven(plan: Plan) -> Iterator[str]:
    """The stored tensors and results whose parts differ in size, once for all copies."""
    shape, assignment, first = plan.mesh.shape, plan.assignment, plan.folded.representative
    for item in plan.graph.inputs:
        name = item.value.name
        if first[name] == name and not is_even(item.value.shape, assignment.layouts[name], shape):
            yield item.fqn
    for op in plan.graph.ops:
        layouts = (assignment.strategies[op.name].output_layout(i) for i in range(len(op.outputs)))
        if first[op.name] == op.name and not all(map(is_even, (x.shape for x in op.outputs), layouts, repeat(shape))):
            yield f"%{op.name}"


def _uneven_s(plan: Plan) -> float:
    """The seconds of a step that all ops take longer on their largest parts than on equal ones."""
    shape, training = plan.mesh.shape, plan.training
    seconds = 0.0
    for op in plan.graph.ops:
        strategy = plan.assignment.strategies[op.name]
        inputs = [(value.shape, strategy.input_layout(i)) for i, value in enumerate(op.inputs)]
        outputs = [(value.shape, strategy.output_layout(i)) for i, value in enumerate(op.outputs)]
        excess = max((_excess(of, layout, shape) for of, layout in (*inputs, *outputs)), default=0.0)
        if excess:
            seconds += excess * sum(op_time(op, strategy, shape, plan.cluster))
    return seconds * training.num_microbatches


def _excess(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> float:
    """The share of the largest part by which it is larger than the mean of all; 0 of shares, which are as asked for."""
    if is_even(shape, layout, mesh_shape) or any(placement.shares for placement in layout):
        return 0.0
    num = math.prod(size for size, placement in zip(mesh_shape, layout) if placement.is_split)
    return 1 - math.prod(shape) / num / math.prod(local_shape(shape, layout, mesh_shape))
