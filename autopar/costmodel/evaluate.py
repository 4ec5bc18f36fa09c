"""The cost of one assignment, op by op and conversion by conversion, without the table of the search."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autopar.costmodel.activations.activation_offload import is_moved, movings
from autopar.costmodel.activations.saved_activations import NOWHERE, inside_shares, region_of_ops
from autopar.costmodel.cluster.hardware import Cluster, check_mesh
from autopar.costmodel.collective_time import collective_time
from autopar.costmodel.memory import input_bytes, input_update_s
from autopar.costmodel.overlap.pass_time import AtOp, BySeconds, PassCost, ends_with_overlap, has_overlap, lane_of
from autopar.costmodel.state_offload import brought_shares, moving_s, optimizer_bytes
from autopar.costmodel.step_cost import ConversionCost, StepCost, step_cost
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.analysis.equal_runs import as_planned
from autopar.sbp.analysis.sampled_graph import NUM_SAMPLED, Sampled, of_graph, sampled
from autopar.sbp.assignment import Assignment, Conversion, buckets
from autopar.sbp.redistribute import Collective, redistribute


@dataclass(frozen=True)
class PlannedCollective:
    """A collective of a plan, on the value `where` (the first of a bucket; the op of an inner collective).

    `users`: the ops that it is for. `is_once`: issued once a step, otherwise in each microbatch. `time_s`: of one.
    """

    where: str
    users: tuple[str, ...]
    collective: Collective
    time_s: float
    is_once: bool = False


@dataclass(frozen=True)
class Costs:
    """The costs of a training step of `num_microbatches` on one device.

    `memory_bytes`: kind -> bytes. The kinds are "parameters", "gradients", "optimizer", "buffers", "constants",
    "arguments", "activations", "gathered" (parameters as ops read them, and their gradients), "recomputed" (inside of
    one region), "waiting" (gradients kept for put-off weight gradients), "fetched" (in transfer from or to the host)
    and "transient" (the largest of an op, less gradients that do not exist then). `moved_bytes`: activations offloaded
    to the host, and as many fetched. `state_on_host_bytes`: optimizer state fetched and sent back once a step.
    `waiting_s`: phase, or "update" for optimizer state -> seconds that the step waits for these transfers. `passes`:
    forward and backward with what they do at each op, of several microbatches the last backward alone; nothing without
    overlap. `communication`: (phase, whether once a step) -> seconds of the collectives, once each. `listed`: makes
    `collectives`.
    """

    compute_forward_s: float
    compute_backward_s: float
    optimizer_s: float
    communication: Mapping[tuple[str, bool], float]
    memory_bytes: Mapping[str, int]
    listed: Callable[[], tuple[PlannedCollective, ...]] = field(repr=False, compare=False)
    num_microbatches: int = 1
    moved_bytes: int = 0
    state_on_host_bytes: int = 0
    waiting_s: dict[str, float] = field(default_factory=dict)
    passes: tuple[PassCost, PassCost] = (PassCost(), PassCost())

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """All collectives of the step, one by one; they take `communication` together."""
        return self.listed()

    def communication_s(self, phase: str) -> float:
        """Seconds of the collectives of `phase`, "forward" or "backward"."""
        return self.communication[phase, True] + self.num_microbatches * self.communication[phase, False]

    def num_issued(self, planned: PlannedCollective) -> int:
        """The number of times that a collective is issued in a step."""
        return 1 if planned.is_once else self.num_microbatches

    def microbatch_s(self, phase: str) -> float:
        """Seconds of `phase` for one microbatch, without the work once a step."""
        compute_s = {"forward": self.compute_forward_s, "backward": self.compute_backward_s}[phase]
        each_s = (compute_s + self.waiting_s.get(phase, 0.0)) / self.num_microbatches
        return each_s + self.communication[phase, False]

    @property
    def collective_microbatch_s(self) -> float:
        """Seconds of a microbatch in which the device waits: for collectives, and for what is offloaded."""
        return sum(
            self.waiting_s.get(phase, 0.0) / self.num_microbatches + self.communication[phase, False]
            for phase in ("forward", "backward")
        )

    @property
    def hidden_s(self) -> float:
        """Seconds of parameters' collectives that go on beside compute."""
        return sum(each.hidden_s for each in self.passes)

    @property
    def once_s(self) -> float:
        """Seconds of the work once a step: gathers, gradient reductions as far as they are not hidden, the update and
        transfers of offloaded state.
        """
        return sum(self.parts_once_s.values())

    @property
    def parts_once_s(self) -> dict[str, float]:
        """Kind of the work once a step -> seconds."""
        return {
            "gathers": self.communication["forward", True],
            "reductions": self.communication["backward", True] - self.hidden_s,
            "update": self.optimizer_s,
            "wait for optimizer state": self.waiting_s.get("update", 0.0),
        }

    @property
    def step_s(self) -> float:
        """Seconds of the step: the sum of all parts, less what is hidden."""
        communication = self.communication_s("forward") + self.communication_s("backward")
        return (
            self.compute_forward_s
            + self.compute_backward_s
            + self.optimizer_s
            + communication
            + sum(self.waiting_s.values())
            - self.hidden_s
        )

    @property
    def total_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())


def evaluate(
    graph: Graph,
    assignment: Assignment,
    mesh: Mesh,
    cluster: Cluster,
    *,
    training: Training = WHOLE_BATCH,
    is_whole: bool = False,
) -> Costs:
    """The costs of `assignment`; errors as in `price`.

    Of copies of a block that are planned alike a few are looked at, and counted; all of them if `is_whole`.
    """
    check_mesh(cluster, mesh.num_devices)
    is_overlapped = has_overlap(cluster, training), ends_with_overlap(cluster, training)
    few = Sampled(graph) if is_whole or any(is_overlapped) else _few_of(graph, assignment)
    regions = of_graph(assignment.recomputed, few.graph), of_graph(assignment.offloaded, few.graph)
    here = replace(assignment, recomputed=regions[0], offloaded=regions[1])
    step = step_cost(few, here, mesh, cluster, training)
    places, moved = _RegionNumbers.of(here), _moved_bytes(few, here, step)
    waits = movings(few, step.footprints, *regions, step.savings, cluster)
    forward_s, again_s = (
        sum(few.num(name) * step.ops[name].forward_s for name in names) for names in (step.ops, places.recomputed)
    )
    backward_s = sum(few.num(name) * cost.backward_s for name, cost in step.ops.items())
    memory = _memory_bytes(few, here, mesh, training, step)
    passes = PassCost(), PassCost()
    if any(is_overlapped):
        forward, backward = _passes(graph, step, places, mesh, cluster, training)
        passes = (forward if is_overlapped[0] else PassCost()), backward
    memory["fetched"] = round(sum(moving.share * size for moving, size in zip(waits, moved)))
    optional = ("gathered", "recomputed", "waiting", "fetched", "transient")
    costs = Costs(
        compute_forward_s=training.num_microbatches * forward_s,
        compute_backward_s=training.num_microbatches * (again_s + backward_s),
        optimizer_s=_optimizer_s(few, assignment, mesh, cluster, training),
        communication=_communication(few, step, places, mesh, cluster),
        memory_bytes={kind: size for kind, size in memory.items() if size or kind not in optional},
        listed=partial(planned_collectives, graph, assignment, mesh, cluster, training),
        num_microbatches=training.num_microbatches,
        moved_bytes=training.num_microbatches * sum(moved),
        waiting_s={
            phase: (
                training.num_microbatches
                * sum(size * getattr(moving, f"{phase}_s") for size, moving in zip(moved, waits))
            )
            for phase in ("forward", "backward")
        },
        passes=passes,
    )
    return with_state_on_host(costs, graph, assignment, mesh, cluster, training)


def _few_of(graph: Graph, assignment: Assignment) -> Sampled:
    """The graph with a few of the copies that are planned alike."""
    folded = fold(graph)
    if all(repeat.count <= NUM_SAMPLED for repeat in folded.repeats):
        return Sampled(graph)
    marked = assignment.recomputed, assignment.offloaded
    return sampled(graph, as_planned(folded, graph, assignment), marked, assignment.state_on_host)


def planned_collectives(
    graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, training: Training
) -> tuple[PlannedCollective, ...]:
    """All collectives of a step, one by one."""
    step = step_cost(Sampled(graph), assignment, mesh, cluster, training)
    return tuple(_collectives(step, _RegionNumbers.of(assignment), mesh, cluster))


def passes_of(
    graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, training: Training
) -> tuple[PassCost, PassCost]:
    """The work of forward and backward at each op of a step with one microbatch."""
    step = step_cost(Sampled(graph), assignment, mesh, cluster, training)
    return _passes(graph, step, _RegionNumbers.of(assignment), mesh, cluster, training)


def _passes(
    graph: Graph, step: StepCost, places: "_RegionNumbers", mesh: Mesh, cluster: Cluster, training: Training
) -> tuple[PassCost, PassCost]:
    """The work of forward and backward at each op; of several microbatches, of the last.

    A conversion is done before the first of its users, backward behind the last of them. Compute
    waits for those once a step that take several collectives one after the other.
    """
    position, forward, backward = {op.name: number for number, op in enumerate(graph.ops)}, list[AtOp](), list[AtOp]()
    for name, cost in step.ops.items():
        is_again = name in places.recomputed
        inner_s = {"forward": 0.0, "backward": 0.0}
        for collective in cost.collectives:
            inner_s[collective.phase] += collective_time(cluster, mesh, collective)
        forward.append(AtOp(cost.forward_s + inner_s["forward"]))
        backward.append(AtOp(cost.backward_s + inner_s["backward"] + is_again * forward[-1].compute_s))

    def add(by_lane: BySeconds, cost: ConversionCost, collectives: Iterable[Collective]) -> None:
        for one in collectives:
            lane = lane_of(cluster.levels, mesh.shape, one.axes)
            by_lane[lane] = by_lane.get(lane, 0.0) + cost.time_s(one, mesh, cluster)

    costs = {id(cost.conversion): cost for cost in step.all_conversions()}
    for bucket in buckets({name: tuple(c.conversion for c in found) for name, found in step.conversions.items()}):
        users = [position.get(use.user, len(forward) - 1) for conversion in bucket for use in conversion.uses]
        is_prefetched = bucket[0].is_prefetched and not training.is_split
        is_put_off = cluster.overlap > 0 and (bucket[0].is_bucketed or (training.is_split and _is_last(bucket, costs)))
        first, last = forward[min(users)], backward[min(users)]
        again = backward[max(users)] if is_prefetched else last
        for cost in (costs[id(conversion)] for conversion in bucket):
            made, back = ([c for c in cost.collectives if c.phase == phase] for phase in ("forward", "backward"))
            add(first.gathered if is_prefetched else first.blocking, cost, made)
            add(last.reduced if is_prefetched else last.put_off if is_put_off else last.blocking, cost, back)
            add(again.gathered if is_prefetched else again.blocking, cost, cost.runs.num_again * cost.again)
    return PassCost(tuple(forward), cluster.overlap), PassCost(tuple(backward), cluster.overlap, is_backward=True)


def _is_last(bucket: Sequence[Conversion], costs: Mapping[int, ConversionCost]) -> bool:
    """Whether the gradients of a bucket are reduced once a step, by one collective."""
    return costs[id(bucket[0])].runs.is_once and len(redistribute(bucket[0].src, bucket[0].dst)) == 1


def with_state_on_host(
    costs: Costs, graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, training: Training
) -> Costs:
    """The costs of `assignment` from its `costs` with all optimizer state on the device."""
    items = (item for item in graph.inputs if item.value.name in assignment.state_on_host)
    state = {x.value.name: optimizer_bytes(x, assignment.layouts[x.value.name], mesh.shape, training) for x in items}
    if not state:
        return costs
    memory, brought = dict(costs.memory_bytes), brought_shares(graph, assignment.state_on_host)
    memory["optimizer"] -= sum(state.values())
    memory["fetched"] = memory.get("fetched", 0) + round(sum(share * state[name] for name, share in brought.items()))
    return replace(
        costs,
        memory_bytes=memory,
        state_on_host_bytes=sum(state.values()),
        waiting_s=costs.waiting_s | {"update": moving_s(sum(state.values()), cluster)},
    )


@dataclass(frozen=True, slots=True)
class _RegionNumbers:
    """Name of an op -> number of its recomputed region, and of its offloaded one."""

    recomputed: Mapping[str, int]
    offloaded: Mapping[str, int]

    @classmethod
    def of(cls, assignment: Assignment) -> "_RegionNumbers":
        return cls(region_of_ops(assignment.recomputed), region_of_ops(assignment.offloaded))


def _collectives(step: StepCost, places: _RegionNumbers, mesh: Mesh, cluster: Cluster) -> Iterator[PlannedCollective]:
    """The collectives of conversions, of conversions repeated in backward, and inner ones of ops.

    Recomputed ops issue those of forward again.
    """
    costs = {id(cost.conversion): cost for cost in step.all_conversions()}
    for bucket in buckets({name: tuple(c.conversion for c in found) for name, found in step.conversions.items()}):
        together = [costs[id(conversion)] for conversion in bucket]
        yield from _of_bucket(together, [cost.collectives for cost in together], mesh, cluster)
        again = [cost for cost in together if cost.runs.num_again]
        yield from _of_bucket(again, [cost.runs.num_again * cost.again for cost in again], mesh, cluster)
    for name, op in step.ops.items():
        for collective in op.collectives:
            time_s = collective_time(cluster, mesh, collective)
            yield PlannedCollective(name, (name,), collective, time_s)
            if name in places.recomputed and collective.phase == "forward":
                yield PlannedCollective(name, (name,), replace(collective, phase="backward"), time_s)


def _of_bucket(
    bucket: Sequence[ConversionCost], each: Sequence[Sequence[Collective]], mesh: Mesh, cluster: Cluster
) -> Iterator[PlannedCollective]:
    """The collectives of a bucket: `each` of its conversions has the same, one after the other.

    A collective has the bytes of all and the sum of their prices.
    """
    users = tuple(use.user for cost in bucket for use in cost.conversion.uses)
    for same in zip(*each, strict=True):
        time_s = sum(cost.time_s(alone, mesh, cluster) for alone, cost in zip(same, bucket))
        together = replace(same[0], num_bytes=sum(alone.num_bytes for alone in same))
        yield PlannedCollective(bucket[0].conversion.value.name, users, together, time_s, bucket[0].runs.is_once)


def _communication(
    few: Sampled, step: StepCost, places: _RegionNumbers, mesh: Mesh, cluster: Cluster
) -> dict[tuple[str, bool], float]:
    """(phase, whether once a step) -> seconds of the collectives that `_collectives` lists for the whole graph."""
    seconds = {(phase, is_once): 0.0 for phase in ("forward", "backward") for is_once in (False, True)}
    for num, cost in _counted(few, step):
        for collective in (*cost.collectives, *cost.runs.num_again * cost.again):
            seconds[collective.phase, cost.runs.is_once] += num * cost.time_s(collective, mesh, cluster)
    for name, op in step.ops.items():
        for collective in op.collectives:
            time_s = few.num(name) * collective_time(cluster, mesh, collective)
            seconds[collective.phase, False] += time_s
            if name in places.recomputed and collective.phase == "forward":
                seconds["backward", False] += time_s
    return seconds


def _counted(few: Sampled, step: StepCost) -> Iterator[tuple[int, ConversionCost]]:
    """(number of conversions of the whole graph, the cost of each) for all conversions of the sampled graph."""
    for name, of_value in step.conversions.items():
        yield from zip(few.num_conversions(name), of_value, strict=True)


def _optimizer_s(few: Sampled, assignment: Assignment, mesh: Mesh, cluster: Cluster, training: Training) -> float:
    layouts = assignment.layouts
    return sum(
        few.num(item.value.name) * input_update_s(item, layouts[item.value.name], mesh.shape, training, cluster)
        for item in few.graph.inputs
    )


def _memory_bytes(
    few: Sampled, assignment: Assignment, mesh: Mesh, training: Training, step: StepCost
) -> dict[str, int]:
    """Kind -> bytes, without those in transfer from or to the host."""
    memory: Counter[str] = Counter()
    places, pending = _RegionNumbers.of(assignment), 0
    for item in few.graph.inputs:
        kinds, num = (
            input_bytes(item, assignment.layouts[item.value.name], mesh.shape, training),
            few.num(item.value.name),
        )
        memory.update({kind: num * size for kind, size in kinds.items()})
        pending += num * kinds["gradients"] if item.value.name in step.pending else 0
    nums = [few.num(region[0]) for region in assignment.recomputed]
    shares = inside_shares(few.graph, step.footprints, assignment.recomputed, step.savings, training.num_waiting, nums)
    inside = [0.0] * len(shares)
    memory["activations"] = 0
    for name, op in step.ops.items():
        num = few.num(name)
        if name in places.recomputed:
            inside[places.recomputed[name]] += num * op.saved_bytes
        elif name not in places.offloaded:
            memory["activations"] += num * training.num_in_flight * op.saved_bytes
        memory["waiting"] += num * training.num_waiting * op.waiting_bytes
    for num, cost in _counted(few, step):
        memory["gathered" if cost.is_parameter else "activations"] += num * cost.kept_bytes
        if cost.inside_bytes:
            inside[cost.saving.region] += num * cost.inside_bytes
    memory["recomputed"] = round(sum(share * size for share, size in zip(shares, inside)))
    memory["transient"] = round(sum(step.transients.values()) - pending)
    return dict(memory)


def _moved_bytes(few: Sampled, assignment: Assignment, step: StepCost) -> list[int]:
    """Bytes that each region offloads in a microbatch, with those of the regions that it stands for."""
    places, moved = _RegionNumbers.of(assignment), [0] * len(assignment.offloaded)
    for op in few.graph.ops:
        if is_moved(op, places.recomputed, places.offloaded):
            moved[places.offloaded[op.name]] += few.num(op.name) * step.ops[op.name].saved_bytes
    for num, cost in _counted(few, step):
        if cost.saving.moved_in != NOWHERE:
            moved[cost.saving.moved_in] += num * cost.moved_bytes
    return moved
