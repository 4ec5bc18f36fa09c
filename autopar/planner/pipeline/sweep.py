"""The sweep of hand plans with stages: every pipeline depth, grid, flavour, schedule and number of microbatches."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np

from autopar.costmodel.cluster.device_groups import orders
from autopar.costmodel.cluster.hardware import Cluster, check_mesh
from autopar.costmodel.stage_transfer import transfers
from autopar.errors import PlanError
from autopar.mesh import PIPELINE, Mesh
from autopar.planner.handwritten.hand_plan import HandPlan, format_hand_plan, parse_hand_plan
from autopar.planner.pipeline.hand_points import EXPERTS, Model, Point, num_data, points, profiled, with_sequence
from autopar.planner.pipeline.partition import Blocks, Partition
from autopar.planner.pipeline.stage_times import as_run, busy_s, cut_within, rank_bytes, recut, time_of
from autopar.planner.promise import rough_step_s
from autopar.planner.request import PlanRequest
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import sub_mesh
from autopar.sbp.assignment import Assignment
from autopar.schedule.orders import Schedule, can_run
from autopar.search.deadline import NEVER, Deadline

# The number of meshes, each with a number of microbatches, that are tried after the deadline: even without time there
# is a hand plan. Once one is found, a few of them end the sweep at this multiple of its time.
_MOST_LATE, _FEW_LATE, _LATEST = 8, 2, 1.5
# Points slower than this multiple of the fastest are left out.
_SHOWN = 1.5
# The number of meshes, each with a number of microbatches, for which the plan with whole parameters is tried too.
_MOST_WHOLE = 12
# The number of meshes that are tried with an axis for the sequence, and the share of the step without it that points on
# them take at most; with a third axis, whose search takes ten times as long, the share of the step without that.
_MOST_IN_SEQUENCES, _WORTH_SEQUENCE, _WORTH_AXIS = 3, 0.97, 0.9
# The share of the time for the points without.
_SHARE_WITHOUT = 0.6
# The most points whose cut is made better, and how near they are to the fastest.
_MOST_RECUT, _NEAR = 12, 1.15
# The share of the step that a better cut takes at most. The search changes the times of blocks by as much as the rest:
# T5 was slower by 1.7% in stages whose cut gained 1.4% by hand.
_WORTH = 0.97
# The share of the step that the groups of devices in another order than that of the ranks take at most.
_WORTH_ORDER = 0.99
# The relative precision of the least memory.
_PRECISION = 1e-3
# The schedules tried by default. gpipe, which takes more memory than 1f1b, is left out where it takes more than this
# share of the others' least time: it waits less for sends of slow links.
SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "gpipe")
_WORTH_MEMORY = 0.98
# The schedules of which one has the least memory for any number of microbatches.
LIGHTEST = ("1f1b", "gpipe")
# `Staged.name`, and the relative difference of costs that are the same.
_NAME = re.compile(r"pp=(?P<ranks>\d+)(,vp=\d+)?,(?P<plan>.+),(?P<schedule>[0-9a-z-]+),m=(?P<num>\d+)(,recompute=\d+)?")
_SAME = 1e-6
# Numbers of stages a rank for the interleaved schedule.
_CHUNKS = (2, 4)


@dataclass(frozen=True)
class Staged:
    """A point of the sweep: each stage has the layouts of the hand plan `plan` on `mesh`, the sub-mesh of a rank.

    Stage s begins at block partition.starts[s]. `assignment`: of the shortened graph of a microbatch. `cluster`: with
    the groups of devices in the order of the ranks.
    """

    plan: HandPlan
    mesh: Mesh
    schedule: Schedule
    partition: Partition
    step_s: float
    assignment: Assignment
    cluster: Cluster

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Bytes of a device of each rank of the pipeline."""
        return rank_bytes(self.partition, self.schedule)

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all devices, its pipeline axis first."""
        if self.schedule.num_ranks == 1:
            return self.mesh
        shape, names = (self.mesh.shape, self.mesh.axis_names) if self.mesh.num_devices > 1 else ((), ())
        shares = tuple((axis + 1, rows) for axis, rows in self.mesh.shares)
        return Mesh((self.schedule.num_ranks, *shape), (PIPELINE, *names), shares)

    @property
    def name(self) -> str:
        """The name of the point, such as
        'pp=4,megatron:dp=2,tp=8,sp,1f1b,m=16', with several stages of a
        rank ('pp=4,vp=2,...') and the number of recomputed blocks.
        """
        again, chunks = sum(self.partition.num_recomputed), self.schedule.num_stages // self.schedule.num_ranks
        words = [f"pp={self.schedule.num_ranks}"] + [f"vp={chunks}"] * (chunks > 1)
        words += [format_hand_plan(self.plan, self.mesh), self.schedule.name]
        words += [f"m={self.schedule.num_microbatches}"] + [f"recompute={again}"] * (again > 0)
        return ",".join(words)


def sweep(
    model: Model,
    meshes: Iterable[tuple[int, Mesh]],
    cluster: Cluster,
    request: PlanRequest,
    *,
    deadline: Deadline = NEVER,
    is_open: bool = False,
) -> list[Staged]:
    """The points that fit, fastest first, without most of those that are far slower.

    `meshes`: (ranks of the pipeline, sub-mesh); if it `is_open` which, those of the fastest points are tried with an
    axis "cp" too. Tensors are split on the axis called "tp" if an axis is called "dp" or "tp", otherwise on every
    choice of inner axes. If the `request` asks for no number of microbatches, the powers of
    two are tried that fill the pipeline. The most promising points are tried first; after `deadline` a few of them, and
    those of sweeps before, whose costs are known.
    Of several orders of groups of devices, another one than that of `cluster` is taken only if that is worth it.
    """
    meshes, late, shared = tuple(meshes), 0, _Sweep(model, cluster, request)
    ordered = tuple(_Sweep(model, one, request) for one in _orders(cluster, request))
    schedules = SCHEDULES if request.schedule is None else (request.schedule,)
    num_microbatches = () if request.num_microbatches is None else (request.num_microbatches,)
    latest = Deadline.after(_LATEST * deadline.remaining_s)
    enough = deadline.part(_SHARE_WITHOUT) if is_open else NEVER

    def is_last() -> bool:
        return latest.is_past or deadline.is_stopped

    staged: list[tuple[Staged, int]] = []

    def best_s() -> float:
        return min((one.step_s for one, _ in staged), default=math.inf)

    for num_ranks, mesh in meshes if cluster.groups is None else ():
        check_mesh(cluster, num_ranks * mesh.num_devices)
    usual = list(enumerate(sorted(points(model, meshes, num_microbatches), key=lambda point: point[2])))
    rough_s = rough_step_s(model.graph, model.starts, cluster, request.training)
    usual.sort(key=lambda one: rough_s(*one[1][:3]))
    for number, (num_ranks, mesh, num, offered) in usual:
        plans = tuple(plan for plan in offered if shared.may_fit(plan, mesh, num_ranks, num))
        is_new = bool(plans) and not shared.is_known(plans, mesh, num)
        late += deadline.is_past and is_new
        is_enough = is_new and bool(staged) and enough.is_past and not deadline.is_past
        if is_enough or late > (_FEW_LATE if staged and is_last() else _MOST_LATE):
            break
        beat_s = best_s() * _SHOWN
        for own in ordered:
            staged += ((one, number) for one in own.on(plans, mesh, num_ranks, num, schedules, beat_s))
    if is_open:
        finest = shared.finest_points([one for one, _ in staged], usual, num_microbatches)
        staged += ((one, len(usual)) for one in shared.in_sequences(finest, schedules, best_s(), is_last))
    whole = dict.fromkeys(other for one, _ in staged for other in shared.as_whole(one))
    for plan, num_ranks, mesh, num in sorted(whole, key=lambda one: rough_s(*one[1:]))[:_MOST_WHOLE]:
        if is_last() and not shared.is_known((plan,), mesh, num):
            break
        for own in ordered:
            staged += [(one, len(usual)) for one in own.on((plan,), mesh, num_ranks, num, schedules)]
    return shared.recut(_ordered(staged, cluster), deadline)


def _ordered(staged: Sequence[tuple[Staged, int]], cluster: Cluster) -> list[Staged]:
    """The points, fastest first: those with the groups of devices in the order of `cluster`, if no other order is worth
    it.
    """
    found = [one for one, _ in sorted(staged, key=lambda pair: (pair[0].step_s, pair[1]))]
    as_given = [one for one in found if one.cluster is cluster]
    return as_given if as_given and as_given[0].step_s * _WORTH_ORDER <= found[0].step_s else found


def _orders(cluster: Cluster, request: PlanRequest) -> tuple[Cluster, ...]:
    return orders(cluster) if request.any_order else (cluster,)


def named_point(
    name: str, costs: HandCosts, model: Model, mesh: Mesh, cluster: Cluster, request: PlanRequest
) -> Staged | None:
    """The point of the sweep of this name and these costs; None if there is none on `mesh`, the stages first, or on
    another one of as many devices.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    num_ranks, num = int(found["ranks"]), int(found["num"])
    shared = _Sweep(model, cluster, request)
    for sub in dict.fromkeys(_sub_meshes(found["plan"], num_ranks, mesh)):
        try:
            plan = parse_hand_plan(found["plan"], sub)
        except PlanError:
            continue
        for point in shared.on((plan,), sub, num_ranks, num, (found["schedule"],)):
            for one in (point, shared.recut_alone(point)):
                is_it = one.name == name and math.isclose(one.step_s, costs.step_s, rel_tol=_SAME)
                if is_it and math.isclose(max(one.rank_bytes), costs.memory_bytes, rel_tol=_SAME):
                    return one
    return None


def _sub_meshes(plan: str, num_ranks: int, mesh: Mesh) -> Iterator[Mesh]:
    """The meshes of a rank of the pipeline that a point may have had: that of `mesh`, and that of `grids`."""
    if PIPELINE not in mesh.axis_names or mesh.shape[0] == num_ranks:
        yield sub_mesh(mesh)
    tensor, experts, sequence = (
        next((int(word[3:]) for word in re.split("[:,]", plan) if re.fullmatch(rf"{axis}=\d+", word)), 1)
        for axis in ("tp", EXPERTS, "cp")
    )
    if mesh.num_devices % (num_ranks * experts) == 0 and tensor == 1 < experts:
        yield Mesh((mesh.num_devices // num_ranks // experts, experts), ("dp", EXPERTS))
    if mesh.num_devices % (num_ranks * tensor * sequence) == 0:
        sizes = {"dp": mesh.num_devices // (num_ranks * tensor * sequence), "cp": sequence, "tp": tensor}
        named = {key: size for key, size in sizes.items() if size > 1} or {"dp": 1}
        yield Mesh(tuple(named.values()), tuple(named))


@dataclass(frozen=True)
class _Sweep:
    """The data that all points of a sweep share."""

    model: Model
    cluster: Cluster
    request: PlanRequest

    def on(
        self,
        plans: tuple[HandPlan, ...],
        mesh: Mesh,
        num_ranks: int,
        num: int,
        schedules: Sequence[str],
        beat_s: float = math.inf,
    ) -> Iterator[Staged]:
        """The plans on a sub-mesh of `num_ranks` in a pipeline, with `num` microbatches; without those that take longer
        than `beat_s` even if no rank is ever idle, and those that save memory which others like them need not save.
        """
        links, fitting = transfers(self.cluster, num_ranks, mesh.num_devices), set[HandPlan]()

        def is_needed(plan: HandPlan) -> bool:
            return plan.flavour != "zero3" or replace(plan, flavour="zero2") not in fitting

        given = plans, num, mesh, self.cluster, self.request.training
        limits_bytes = self.request.rank_limits(self.cluster, num_ranks)
        for plan, assignment, blocks in profiled(self.model, *given, is_needed):
            fitting.add(plan)
            least_s = math.inf
            for schedule in _schedules(num_ranks, num, schedules, len(self.model.starts)):
                own = as_run(blocks, schedule)
                cut, is_lavish = cut_within(own, schedule, limits_bytes), schedule.name == "gpipe" != schedules[0]
                if not is_lavish and (cut is None or any(cut.num_recomputed)):
                    fitting.discard(plan)
                if cut is not None and busy_s(own, cut, schedule) <= beat_s * links[0].speedup:
                    time_s = float(time_of(own, cut, schedule, links))
                    if not is_lavish or time_s <= _WORTH_MEMORY * least_s < math.inf:
                        least_s = min(least_s, time_s)
                        yield Staged(plan, mesh, schedule, cut, time_s, assignment, self.cluster)

    def recut(self, found: Sequence[Staged], deadline: Deadline) -> list[Staged]:
        """Points, fastest first, with better cuts for the best of each mesh and schedule that come near the first."""
        kinds, made = set(), list[Staged]()
        for one in found:
            kind, is_near = (one.mesh, one.schedule), one.step_s <= _NEAR * found[0].step_s
            if is_near and kind not in kinds and len(kinds) < _MOST_RECUT and not deadline.is_past:
                kinds.add(kind)
                one = self.recut_alone(one)
            made.append(one)
        return sorted(made, key=lambda one: one.step_s)

    def recut_alone(self, point: Staged) -> Staged:
        """The point with a better cut, if that is worth it."""
        mesh, schedule = point.mesh, point.schedule
        links = transfers(point.cluster, schedule.num_ranks, mesh.num_devices)
        asked = (point.plan,), schedule.num_microbatches, mesh, point.cluster, self.request.training
        ((_, _, blocks),) = profiled(self.model, *asked)
        own = as_run(blocks, schedule)
        limits_bytes = self.request.rank_limits(point.cluster, schedule.num_ranks)
        cut = recut(own, point.partition, schedule, links, limits_bytes)
        step_s = time_of(own, cut, schedule, links)
        return replace(point, partition=cut, step_s=step_s) if step_s <= _WORTH * point.step_s else point

    def is_known(self, plans: tuple[HandPlan, ...], mesh: Mesh, num: int) -> bool:
        """Whether a sweep before has profiled any of the plans with `num` microbatches."""
        one = self.cluster if self.cluster.groups is None else self.cluster.groups.members[0][1]
        return any((plan, num, mesh, one, self.request.training) in self.model.profiles for plan in plans)

    def may_fit(self, plan: HandPlan, mesh: Mesh, num_ranks: int, num: int) -> bool:
        """Whether even shares of all parameters and their state, and what `plan` gathers of them, may fit the devices.

        `num`: of microbatches.
        """
        data, training, sizes = num_data(plan, mesh), self.request.training, self.model.parameter_sizes.items()
        own_bytes = sum(itemsize * num for itemsize, num in sizes)
        state_bytes = sum(training.state_bytes(itemsize) * num for itemsize, num in sizes)
        stored = (2 * own_bytes + state_bytes) / (num_ranks * mesh.num_devices)
        gathered = own_bytes * data / (mesh.num_devices * num_ranks) if plan.flavour == "zero2" else 0.0
        mean = sum(self.request.rank_limits(self.cluster, num_ranks)) / num_ranks
        return stored + gathered * (2 if num > 1 else 1) <= mean

    def in_sequences(
        self, finest: Iterable[Point], schedules: Sequence[str], whole_s: float, is_last: Callable[[], bool]
    ) -> list[Staged]:
        """Of the points that split the sequence those that are worth it beside `whole_s`, of the best that does not."""
        found: list[Staged] = []
        for num_ranks, mesh, num, plans in finest:
            if is_last() and not self.is_known(plans, mesh, num):
                break
            best_s = min((one.step_s for one in found), default=whole_s)
            worth_s = _WORTH_SEQUENCE * whole_s if mesh.ndim < 3 else _WORTH_AXIS * best_s
            split = self.on(plans, mesh, num_ranks, num, schedules, worth_s)
            found += [one for one in split if one.step_s <= worth_s]
        return found

    def finest_points(
        self, found: Sequence[Staged], tried: Sequence[tuple[int, Point]], num_microbatches: Sequence[int]
    ) -> Iterator[Point]:
        """The points that split the sequence too, the fewest axes first, on the meshes of the fastest of `found` in
        whose microbatches a rank has one sample; of those `tried` if none is found. More samples are split instead.
        """

        def is_finest(plan: HandPlan, mesh: Mesh, num: int) -> bool:
            return num_data(plan, mesh) * num == self.model.num_samples

        meshes = [(num_ranks, mesh) for _, (num_ranks, mesh, num, plans) in tried if is_finest(plans[0], mesh, num)]
        if found:
            near_s = _NEAR * min(one.step_s for one in found)
            near = sorted((one for one in found if one.step_s <= near_s), key=lambda one: one.step_s)
            finest = (one for one in near if is_finest(one.plan, one.mesh, one.schedule.num_microbatches))
            meshes = [(one.schedule.num_ranks, one.mesh) for one in finest]
        few = islice(dict.fromkeys(meshes), _MOST_IN_SEQUENCES)
        split = dict.fromkeys((num_ranks, own) for num_ranks, mesh in few for own in with_sequence(mesh))
        few_axes = sorted(split, key=lambda one: one[1].ndim)
        for num_ranks, mesh, num, plans in points(self.model, few_axes, num_microbatches):
            own = tuple(plan for plan in plans if plan.sequence_axes and is_finest(plan, mesh, num))
            if own:
                yield num_ranks, mesh, num, own

    def as_whole(self, point: Staged) -> Iterator[tuple[HandPlan, int, Mesh, int]]:
        """The point with whole parameters on the data axes, which need no gathering, if they may fit: (plan, ranks of
        the pipeline, sub-mesh, number of microbatches).
        """
        plan, schedule = replace(point.plan, flavour="ddp"), point.schedule
        given = point.mesh, schedule.num_ranks, schedule.num_microbatches
        if plan != point.plan and self.may_fit(plan, *given):
            yield plan, schedule.num_ranks, point.mesh, schedule.num_microbatches


def lightest(
    model: Model,
    meshes: Iterable[tuple[int, Mesh]],
    cluster: Cluster,
    request: PlanRequest,
    *,
    deadline: Deadline = NEVER,
) -> Staged | None:
    """The point of the sweep with the least memory of a device, to a thousandth, among those tried by `deadline`.

    The memory of each rank counts in proportion to its limit, as bytes of the rank with the most. None if no schedule
    can run.
    """
    best, least = None, math.inf
    schedules = (request.schedule,) if request.schedule else LIGHTEST
    num_microbatches = () if request.num_microbatches is None else (request.num_microbatches,)
    every = points(model, tuple(meshes), num_microbatches)
    for own, (num_ranks, mesh, num, plans) in product(_orders(cluster, request), every):
        limits = np.array(request.rank_limits(own, num_ranks))
        sizes = limits / limits.max() if np.isfinite(limits).all() else np.ones(num_ranks)
        if deadline.is_past and best is not None:
            break
        for plan, assignment, blocks in profiled(model, plans, num, mesh, own, request.training):
            for schedule in _schedules(num_ranks, num, schedules, len(model.starts)):
                part = _lightest_cut(as_run(blocks, schedule), schedule, sizes, least)
                if part is not None:
                    best = Staged(plan, mesh, schedule, part, 0.0, assignment, own)
                    least = float((np.array(best.rank_bytes) / sizes).max())
    return best


def _lightest_cut(blocks: Blocks, schedule: Schedule, sizes: np.ndarray, below: float) -> Partition | None:
    """The cut with the least memory, each rank's over its share of `sizes`; None if that is not below `below` bytes."""
    cut = cut_within(blocks, schedule, below * (1 - _PRECISION) * sizes)
    if cut is None:
        return None
    low, high = 0.0, float((np.array(rank_bytes(cut, schedule)) / sizes).max())
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        lighter = cut_within(blocks, schedule, middle * sizes)
        low, high, cut = (low, middle, lighter) if lighter is not None else (middle, high, cut)
    return cut


def _schedules(num_ranks: int, num: int, names: Sequence[str], num_blocks: int) -> Iterator[Schedule]:
    if num_ranks == 1:
        yield Schedule("accumulate", 1, 1, num)
        return
    for name in names:
        for chunks in _CHUNKS if name == "interleaved" else (1,):
            if chunks * num_ranks <= num_blocks and can_run(name, chunks * num_ranks, num_ranks, num):
                yield Schedule(name, chunks * num_ranks, num_ranks, num)
