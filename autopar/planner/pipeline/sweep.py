"""The sweep of hand plans with stages: every pipeline depth, grid, flavour, schedule and number of microbatches."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster, check_mesh
from autopar.costmodel.profile_ops import Profile, Shared, profile
from autopar.costmodel.stage_transfer import transfer
from autopar.costmodel.training import Training
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.ir.split_stages import cut_points
from autopar.mesh import Mesh
from autopar.planner.handwritten.hand_plan import HandPlan, Outline, format_hand_plan, outlined
from autopar.planner.pipeline.partition import Blocks, Partition, blocks_of, partition
from autopar.planner.pipeline.stage_times import in_flight, rank_bytes, stage_times, time_of, waiting
from autopar.planner.promise import rough_step_s
from autopar.sbp.analysis.sample_blocks import Short, fold_microbatch
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.microbatch.microbatch_graph import microbatch_counts, microbatched
from autopar.schedule.orders import IN_ROUNDS, Schedule, can_run
from autopar.search.deadline import NEVER, Deadline

# The number of meshes, each with a number of microbatches, that are tried after the deadline: even without time there
# is a hand plan.
_MOST_LATE = 8
# The most numbers of microbatches tried on a mesh.
_MOST_COUNTS = 6
# The number of microbatches for each rank of a pipeline that makes its bubble small.
_FULL = 4
# Points slower than this multiple of the fastest are left out.
_SHOWN = 1.5
# The number of fastest points for which the plan with whole parameters is tried too.
_MOST_WHOLE = 3
# The relative precision of the least memory.
_PRECISION = 1e-3
# The schedules tried by default; gpipe, which takes more memory than 1f1b, only on request.
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
# The schedules of which one has the least memory for any number of microbatches.
LIGHTEST = ("1f1b", "gpipe")
# Numbers of stages a rank for the interleaved schedule.
_CHUNKS = (2, 4)


@dataclass(frozen=True)
class Staged:
    """A point of the sweep: each stage has the layouts of the hand plan `plan` on `mesh`, the sub-mesh of a rank.

    Stage s begins at block partition.starts[s]. `assignment`: of the shortened graph of a microbatch.
    """

    plan: HandPlan
    mesh: Mesh
    schedule: Schedule
    partition: Partition
    step_s: float
    assignment: Assignment

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Bytes of a device of each rank of the pipeline."""
        return rank_bytes(self.partition, self.schedule)

    @property
    def name(self) -> str:
        """The name of the point, such as
        'pp=4,megatron:dp=2,tp=8,sp,1f1b,m=16', with the number of
        recomputed blocks.
        """
        again = sum(self.partition.num_recomputed)
        words = [f"pp={self.schedule.num_ranks}", format_hand_plan(self.plan, self.mesh), self.schedule.name]
        words += [f"m={self.schedule.num_microbatches}"] + [f"recompute={again}"] * (again > 0)
        return ",".join(words)


Profiled = tuple[HandPlan, Assignment, Blocks]


@dataclass(frozen=True, eq=False)
class Model:
    """The model for the sweep: its outline, the ops at which stages may start, and the recomputable blocks."""

    graph: Graph
    folded: Folded
    outline: Outline
    starts: tuple[int, ...]  # positions of the blocks' first ops, the first 0
    recomputable: tuple[int, ...]
    counts: tuple[int, ...]  # of microbatches
    of_microbatches: dict[int, Outline] = field(default_factory=dict)  # those made so far
    # those made so far, which no memory limit changes
    profiles: dict[Hashable, list[Profiled]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """The number that data axes and microbatches together must divide: the batch's size if it cannot be cut."""
        if len(self.counts) > 1:
            return self.counts[-1]
        return next((item.value.shape[0] for item in self.graph.of_kind("argument") if item.value.shape), 1)

    def of_microbatch(self, num: int) -> Outline:
        """The outline of one of `num` microbatches."""
        if num in self.of_microbatches:
            return self.of_microbatches[num]
        short = self.outline.short
        micro = microbatched(short.graph, num)
        self.of_microbatches[num] = replace(
            self.outline, short=replace(short, graph=micro.graph, folded=fold_microbatch(short.folded, micro))
        )
        return self.of_microbatches[num]


def model_of(graph: Graph, folded: Folded) -> Model:
    """The model of the whole batch's graph, computed once for all meshes."""
    position = {op.name: number for number, op in enumerate(graph.ops)}
    starts = (0, *(position[name] for name in cut_points(folded, graph)))
    copies = {position[r.ops[0]] + k * len(r.ops) for r in folded.repeats for k in range(r.count)}
    recomputable = tuple(number for number, start in enumerate(starts) if start in copies)
    outline = outlined(graph, folded)
    return Model(graph, folded, outline, starts, recomputable, microbatch_counts(outline.short.graph))


def sweep(
    model: Model,
    meshes: Iterable[tuple[int, Mesh]],
    cluster: Cluster,
    *,
    training: Training,
    limit_bytes: float,
    num_microbatches: Sequence[int] = (),
    schedules: Sequence[str] = SCHEDULES,
    deadline: Deadline = NEVER,
) -> list[Staged]:
    """The points that fit, fastest first, without most of those that are far slower.

    `meshes`: (ranks of the pipeline, sub-mesh). Tensors are split on the axis called "tp" if an axis is called "dp" or
    "tp", otherwise on every choice of inner axes. `num_microbatches`: the numbers to try, by default the powers of two
    that fill the pipeline. The most promising points are tried first, and only a few after `deadline`.
    """
    meshes, late = tuple(meshes), 0
    found: list[tuple[Staged, int]] = []
    for num_ranks, mesh in meshes:
        check_mesh(cluster, num_ranks * mesh.num_devices)
    usual = sorted(points(model, meshes, num_microbatches), key=lambda point: point[2])
    rough_s = rough_step_s(model.graph, model.starts, cluster, training)
    for number, (num_ranks, mesh, num, offered) in sorted(enumerate(usual), key=lambda one: rough_s(*one[1][:3])):
        plans = tuple(plan for plan in offered if _may_fit(model, plan, mesh, num_ranks, num, training, limit_bytes))
        late += deadline.is_past and bool(plans)
        if late > _MOST_LATE:
            break
        beat_s = min((one.step_s for one, _ in found), default=math.inf) * _SHOWN
        here = _on(
            model,
            model.of_microbatch(num),
            plans,
            num,
            num_ranks,
            mesh,
            cluster,
            training,
            limit_bytes,
            schedules,
            beat_s,
        )
        found += ((one, number) for one in here)
    found += [(one, len(usual)) for one in _with_whole_parameters(model, found, cluster, training, limit_bytes)]
    return [one for one, _ in sorted(found, key=lambda pair: (pair[0].step_s, pair[1]))]


def _with_whole_parameters(
    model: Model, found: Sequence[tuple[Staged, int]], cluster: Cluster, training: Training, limit_bytes: float
) -> Iterator[Staged]:
    """The fastest points with whole parameters on the data axes instead, if they fit: these need no gathering."""
    kinds: dict[tuple, Staged] = {}
    for one, _ in sorted(found, key=lambda pair: pair[0].step_s):
        kinds.setdefault((one.mesh, one.schedule.name, one.schedule.num_microbatches, one.plan.tensor_axes), one)
    for one in list(kinds.values())[:_MOST_WHOLE]:
        plan, num, num_ranks = replace(one.plan, flavour="ddp"), one.schedule.num_microbatches, one.schedule.num_ranks
        if plan != one.plan and _may_fit(model, plan, one.mesh, num_ranks, num, training, limit_bytes):
            outline, names = model.of_microbatch(num), (one.schedule.name,)
            yield from _on(model, outline, (plan,), num, num_ranks, one.mesh, cluster, training, limit_bytes, names)


Point = tuple[int, Mesh, int, tuple[HandPlan, ...]]  # ranks of the pipeline, sub-mesh, number of microbatches, plans


def points(model: Model, meshes: Sequence[tuple[int, Mesh]], num_microbatches: Sequence[int]) -> list[Point]:
    """The points to try, in which every data rank has a sample of each microbatch.

    If the batch is too small for that on all of `meshes` with the usual numbers of microbatches, fewer are tried;
    otherwise the batch stays whole, and the search finds another split.
    """

    def those(counts_of: Callable[[int], Sequence[int]], divides: Callable[[int, int], bool]) -> list[Point]:
        found = (
            (num_ranks, mesh, num, tuple(plan for plan in _plans(mesh) if divides(_num_data(plan, mesh), num)))
            for num_ranks, mesh in meshes
            for num in num_microbatches or counts_of(num_ranks)
        )
        return [point for point in found if point[-1]]

    def is_even(data: int, num: int) -> bool:
        return model.num_samples % (data * num) == 0

    return (
        those(lambda num_ranks: _counts(model, num_ranks), is_even)
        or those(lambda _: model.counts, is_even)
        or those(lambda num_ranks: _counts(model, num_ranks), lambda *_: True)
    )


def _counts(model: Model, num_ranks: int) -> list[int]:
    """Numbers of microbatches to try: powers of two that fill the pipeline, or all possible ones if there are few."""
    powers = [num for num in model.counts if num & (num - 1) == 0]
    usual = powers if powers[-1] >= _FULL * num_ranks else model.counts
    return [num for num in usual if num_ranks == 1 or num >= min(num_ranks, usual[-1])][:_MOST_COUNTS]


def _num_data(plan: HandPlan, mesh: Mesh) -> int:
    """The number of ranks among which the plan splits the batch."""
    return math.prod(size for axis, size in enumerate(mesh.shape) if axis not in plan.tensor_axes)


def _plans(mesh: Mesh) -> Iterator[HandPlan]:
    """The hand plans of the sweep: tensor parallelism with sequence parallelism, and split parameters.

    Split parameters cost as much communication as data parallelism and take less memory.
    """
    named = tuple(axis for axis, name in enumerate(mesh.axis_names) if name == "tp")
    inner = [tuple(axis for axis in range(first, mesh.ndim) if mesh.shape[axis] > 1) for first in range(mesh.ndim + 1)]
    for axes in (named,) if {"dp", "tp"} & set(mesh.axis_names) else dict.fromkeys(inner):
        flavours = (
            ("zero2", "zero3")
            if any(mesh.shape[axis] > 1 for axis in range(mesh.ndim) if axis not in axes)
            else ("ddp",)
        )
        yield from (HandPlan(axes, bool(axes), flavour) for flavour in flavours)


def _may_fit(
    model: Model, plan: HandPlan, mesh: Mesh, num_ranks: int, num: int, training: Training, limit_bytes: float
) -> bool:
    """Whether an even share of the stored and gathered bytes fits."""
    data = _num_data(plan, mesh)
    parameters = [item.value for item in model.graph.of_kind("parameter")]
    own_bytes, elements = sum(x.num_bytes for x in parameters), sum(math.prod(x.shape) for x in parameters)
    stored = (2 * own_bytes + elements * training.state_bytes) / (num_ranks * mesh.num_devices)
    gathered = (
        own_bytes * num_ranks * data / (num_ranks * mesh.num_devices) / num_ranks if plan.flavour == "zero2" else 0.0
    )
    return stored + gathered * (2 if num > 1 else 1) <= limit_bytes


def _on(
    model: Model,
    outline: Outline,
    plans: tuple[HandPlan, ...],
    num: int,
    num_ranks: int,
    mesh: Mesh,
    cluster: Cluster,
    training: Training,
    limit_bytes: float,
    schedules: Sequence[str],
    beat_s: float = math.inf,
) -> Iterator[Staged]:
    """The points on one mesh with one number of microbatches, without those whose busiest rank exceeds `beat_s`."""
    link = transfer(cluster, num_ranks, mesh.num_devices)
    for plan, assignment, blocks in profiled(model, outline, plans, num, mesh, cluster, training):
        for schedule in _schedules(num_ranks, num, schedules, len(model.starts)):
            own = as_run(blocks, schedule)
            cuts = {_cut(own, schedule, limit_bytes, at) for at in _transfers(schedule, link)} - {None}
            timed = [(float(time_of(own, x, schedule, link)), x) for x in cuts if _busy_s(own, x, schedule) <= beat_s]
            if timed:
                time_s, found = min(timed, key=lambda one: (one[0], one[1].starts))
                yield Staged(plan, mesh, schedule, found, time_s, assignment)


def profiled(
    model: Model,
    outline: Outline,
    plans: tuple[HandPlan, ...],
    num: int,
    mesh: Mesh,
    cluster: Cluster,
    training: Training,
) -> list[Profiled]:
    """(plan, its assignment of the outline's short graph, the costs of each block of the whole model) of `plans`."""
    key = plans, num, mesh, cluster.to_json(), training
    if key not in model.profiles:
        model.profiles[key] = list(_profiled(model, outline, plans, num, mesh, cluster, training)) if plans else []
    return model.profiles[key]


def _profiled(
    model: Model,
    outline: Outline,
    plans: tuple[HandPlan, ...],
    num: int,
    mesh: Mesh,
    cluster: Cluster,
    training: Training,
) -> Iterator[Profiled]:
    short = outline.short
    candidates = annotate(short.graph, mesh, short.folded)
    index = _index(model, short)
    for plan, assignment in outline.follow(plans, candidates, mesh).items():
        figures = profile(short.graph, assignment, mesh, cluster, training=replace(training, num_microbatches=num))
        yield plan, assignment, blocks_of(_expanded(figures, index), model.starts, model.recomputable)


def lightest(
    model: Model,
    meshes: Iterable[tuple[int, Mesh]],
    cluster: Cluster,
    *,
    training: Training,
    num_microbatches: Sequence[int] = (),
    schedules: Sequence[str] = LIGHTEST,
    deadline: Deadline = NEVER,
) -> Staged | None:
    """The point of the sweep with the least memory of a device, to a thousandth, among those tried by `deadline`.

    None if no schedule can run.
    """
    best: Staged | None = None
    for num_ranks, mesh, num, plans in points(model, tuple(meshes), num_microbatches):
        if deadline.is_past and best is not None:
            break
        for plan, assignment, blocks in profiled(model, model.of_microbatch(num), plans, num, mesh, cluster, training):
            for schedule in _schedules(num_ranks, num, schedules, len(model.starts)):
                found = _lightest_cut(as_run(blocks, schedule), schedule, max(best.rank_bytes) if best else math.inf)
                if found is not None:
                    best = Staged(plan, mesh, schedule, found, 0.0, assignment)
    return best


def _lightest_cut(blocks: Blocks, schedule: Schedule, below: float) -> Partition | None:
    """The cut with the least memory; None if that is not below `below` bytes."""
    found = _cut(blocks, schedule, below * (1 - _PRECISION))
    if found is None:
        return None
    low, high = 0.0, max(found.memory_bytes)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        lighter = _cut(blocks, schedule, middle)
        low, high, found = (low, middle, lighter) if lighter is not None else (middle, high, found)
    return found


def _schedules(num_ranks: int, num: int, names: Sequence[str], num_blocks: int) -> Iterator[Schedule]:
    if num_ranks == 1:
        yield Schedule("accumulate", 1, 1, num)
        return
    for name in names:
        for chunks in _CHUNKS if name == "interleaved" else (1,):
            if chunks * num_ranks <= num_blocks and can_run(name, chunks * num_ranks, num_ranks, num):
                yield Schedule(name, chunks * num_ranks, num_ranks, num)


def _transfers(schedule: Schedule, link: tuple[float, float]) -> tuple[float, ...]:
    """Seconds a byte by which p2p delays a stage, for choosing cuts: 0
    for schedules in rounds (see `simulate.ends`).
    """
    return (0.0,) if schedule.num_ranks == 1 or schedule.name in IN_ROUNDS else (0.0, 1 / link[1])


def as_run(blocks: Blocks, schedule: Schedule) -> Blocks:
    """The costs of the blocks under `schedule`; a split backward gathers parameters twice."""
    if schedule.name != "zero-bubble" or not blocks.split_s.any():
        return blocks
    never = np.zeros_like(blocks.is_recomputable)
    return replace(blocks, backward_s=blocks.backward_s + blocks.split_s, is_recomputable=never)


def _cut(blocks: Blocks, schedule: Schedule, limit_bytes: float, transfer_s_per_byte: float = 0.0) -> Partition | None:
    """The cut with the fastest slowest stage, with the stages of each rank within the limit; None if there is none.

    It is the cut without a limit if that fits. Otherwise each stage gets an even share of its rank's memory, or the
    share that it has without a limit.
    """

    def cut(limits: float | Sequence[float]) -> Partition | None:
        return partition(
            blocks, in_flight(schedule), limits, waiting=waiting(schedule), transfer_s_per_byte=transfer_s_per_byte
        )

    if schedule.num_stages == schedule.num_ranks:
        return cut(limit_bytes)
    free = cut(math.inf)
    if free is None or max(rank_bytes(free, schedule)) <= limit_bytes:
        return free
    shared = cut(limit_bytes * schedule.num_ranks / schedule.num_stages), cut(_shares(free, schedule, limit_bytes))
    return min((one for one in shared if one is not None), key=lambda one: max(one.times_s), default=None)


def _shares(found: Partition, schedule: Schedule, limit_bytes: float) -> tuple[float, ...]:
    """The limit of each stage if the stages of a rank share its limit in proportion to their memory in `found`."""
    most = rank_bytes(found, schedule)
    return tuple(limit_bytes * size / most[schedule.rank_of(stage)] for stage, size in enumerate(found.memory_bytes))


def _busy_s(blocks: Blocks, found: Partition, schedule: Schedule) -> float:
    """Seconds of compute of the busiest rank."""
    times = stage_times(blocks, found, (0.0, math.inf))
    ranks = ([times[stage] for stage in schedule.stages_of(rank)] for rank in range(schedule.num_ranks))
    return schedule.num_microbatches * max(
        sum(one.forward_s + one.backward_s + one.weight_s for one in own) for own in ranks
    )


def _index(model: Model, short: Short) -> np.ndarray:
    """i64[ops of the whole graph]: index of each op in the short graph:
    of itself, or of its counterpart in copy two.
    """
    same = model.folded.representative
    position = {op.name: number for number, op in enumerate(short.graph.ops)}
    alike: dict[str, list[int]] = {}
    for op in short.graph.ops:
        if op.name in same:
            alike.setdefault(same[op.name], []).append(position[op.name])
    return np.array([position[op.name] if op.name in position else alike[same[op.name]][1] for op in model.graph.ops])


def _expanded(found: Profile, index: np.ndarray) -> Profile:
    """The profile of the whole graph from that of the short one; `index`: as `_index` gives it."""
    columns = {name: column[index] for name, column in vars(found).items() if isinstance(column, np.ndarray)}
    shared = (
        Shared(tuple(np.flatnonzero(np.isin(index, one.positions)).tolist()), one.state_bytes, one.once_s)
        for one in found.shared
    )
    return replace(found, **columns, shared=tuple(shared))


def grids(num_devices: int, cluster: Cluster, *, num_layers: int, most_tensor: int) -> Iterator[tuple[int, Mesh]]:
    """(ranks of the pipeline, mesh dp x tp) for every factorisation of
    the devices, stages outermost, tensors innermost.
    """
    for num_ranks in (n for n in range(1, min(num_devices, num_layers) + 1) if num_devices % n == 0):
        rest = num_devices // num_ranks
        for tensor in (n for n in range(1, min(rest, most_tensor) + 1) if rest % n == 0):
            sizes = {"dp": rest // tensor, "tp": tensor}
            named = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
            yield num_ranks, Mesh(tuple(named.values()), tuple(named))
