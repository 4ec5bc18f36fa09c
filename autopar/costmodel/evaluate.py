"""The cost of one assignment, op by op and conversion by conversion, without folding and without the table."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.costmodel.activations.activation_offload import is_moved, movings
from autopar.costmodel.activations.autograd_footprint import Footprint, footprints
from autopar.costmodel.activations.saved_activations import NOWHERE, Saving, inside_shares, region_of_ops, savings
from autopar.costmodel.activations.transients import largest_transient, transient_bytes
from autopar.costmodel.cluster.hardware import Cluster, check_mesh
from autopar.costmodel.collective_time import collective_time
from autopar.costmodel.conversion_cost import kept_bytes
from autopar.costmodel.inner_collectives import inner_collectives
from autopar.costmodel.memory import input_bytes, saved_by_op, update_bytes, waiting_bytes
from autopar.costmodel.roofline import local_shapes, op_time
from autopar.costmodel.state_offload import brought_shares, moving_s, optimizer_bytes
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh
from autopar.sbp.analysis.sampled_graph import Sampled
from autopar.sbp.assignment import Assignment, Conversion, buckets, conversions
from autopar.sbp.redistribute import Collective, again_in_backward, collectives_together, redistribute


@dataclass(frozen=True)
class PlannedCollective:
    """A collective on value (of a bucket, its first; from inside an op, the op) `where`, for the ops `users`. is_once:
    issued once a step, else in each microbatch. time_s: of one.
    """

    where: str
    users: tuple[str, ...]
    collective: Collective
    time_s: float
    is_once: bool = False


@dataclass(frozen=True)
class Costs:
    """One training step of `num_microbatches` on one device. memory_bytes: kind ("parameters", "gradients",
    "optimizer", "buffers", "constants", "arguments", "activations", "gathered": parameters as ops read them and
    gradients of those, "recomputed": inside of one region, "waiting": gradients kept for weights, "fetched": what is on
    its way to the host or back, "transient": the largest of an op, less the gradients that are not there yet) -> bytes.
    moved_bytes: to the host, and as many back; state_on_host_bytes: of the optimizer, moved once a step; waiting_s:
    phase, or "update" for the latter -> seconds that the step waits for them.
    """

    compute_forward_s: float
    compute_backward_s: float
    optimizer_s: float
    collectives: tuple[PlannedCollective, ...]
    memory_bytes: Mapping[str, int]
    num_microbatches: int = 1
    moved_bytes: int = 0
    state_on_host_bytes: int = 0
    waiting_s: dict[str, float] = field(default_factory=dict)

    def communication_s(self, phase: str) -> float:
        """Seconds of the collectives of `phase`, "forward" or "backward"."""
        return sum(
            planned.time_s * self.num_issued(planned)
            for planned in self.collectives
            if planned.collective.phase == phase
        )

    def num_issued(self, planned: PlannedCollective) -> int:
        """How many times a step."""
        return 1 if planned.is_once else self.num_microbatches

    def microbatch_s(self, phase: str) -> float:
        """Seconds of `phase` of one microbatch, without what is done once a step."""
        compute_s = {"forward": self.compute_forward_s, "backward": self.compute_backward_s}[phase]
        each_s = (compute_s + self.waiting_s.get(phase, 0.0)) / self.num_microbatches
        return each_s + sum(p.time_s for p in self.collectives if p.collective.phase == phase and not p.is_once)

    @property
    def once_s(self) -> float:
        """Seconds of what is done once a step: parameters gathered, their gradients reduced, the optimizer and its
        state on the host.
        """
        once_s = sum(planned.time_s for planned in self.collectives if planned.is_once)
        return self.optimizer_s + once_s + self.waiting_s.get("update", 0.0)

    @property
    def step_s(self) -> float:
        """All of it, one after the other."""
        communication = self.communication_s("forward") + self.communication_s("backward")
        return (
            self.compute_forward_s
            + self.compute_backward_s
            + self.optimizer_s
            + communication
            + sum(self.waiting_s.values())
        )

    @property
    def total_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())


def evaluate(
    graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, *, training: Training = WHOLE_BATCH
) -> Costs:
    """What `assignment` costs; errors as in `price`."""
    check_mesh(cluster, mesh.num_devices)
    step = _Step(graph, assignment, mesh, cluster)
    moved = step.moved_bytes()
    times = {op.name: op_time(op, assignment.strategies[op.name], mesh.shape, cluster) for op in graph.ops}
    forward_s, again_s = sum(time[0] for time in times.values()), sum(times[name][0] for name in step.places)
    updated = sum(
        update_bytes(item, assignment.layouts[item.value.name], mesh.shape, training) for item in graph.inputs
    )
    costs = Costs(
        compute_forward_s=training.num_microbatches * forward_s,
        compute_backward_s=training.num_microbatches * (again_s + sum(time[1] for time in times.values())),
        optimizer_s=updated / cluster.memory_bandwidth_bytes_per_s,
        collectives=(*step.converting(), *step.again(training), *step.inside_ops()),
        memory_bytes=step.memory_bytes(training),
        num_microbatches=training.num_microbatches,
        moved_bytes=training.num_microbatches * sum(moved),
        waiting_s={
            phase: (
                training.num_microbatches
                * sum(size * getattr(moving, f"{phase}_s") for size, moving in zip(moved, step.movings))
            )
            for phase in ("forward", "backward")
        },
    )
    return with_state_on_host(costs, graph, assignment, mesh, cluster, training)


def with_state_on_host(
    costs: Costs, graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, training: Training
) -> Costs:
    """What `assignment` costs, from what it does with all optimizer state on the device."""
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


class _Step:
    """What follows from the assignment, found once."""

    def __init__(self, graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster) -> None:
        self.graph, self.assignment, self.mesh, self.cluster = graph, assignment, mesh, cluster
        self.conversions: Mapping[str, tuple[Conversion, ...]] = conversions(graph, assignment)
        self.known: Mapping[str, Footprint] = footprints(graph)
        self.places = region_of_ops(assignment.recomputed)
        self.away = region_of_ops(assignment.offloaded)
        self.savings = savings(graph, self.known, assignment.recomputed, assignment.offloaded)
        self.movings = movings(
            Sampled(graph), self.known, assignment.recomputed, assignment.offloaded, self.savings, cluster
        )
        self.parameters = {item.value.name for item in graph.of_kind("parameter")}

    def converting(self) -> Iterator[PlannedCollective]:
        """Those of the conversions. A bucket takes the sum of what its members are priced at."""
        for bucket in buckets(self.conversions):
            where, users = bucket[0].value.name, tuple(use.user for conversion in bucket for use in conversion.uses)
            is_once = where in self.parameters and not bucket[0].is_regathered
            for step in redistribute(bucket[0].src, bucket[0].dst):
                for number, collective in enumerate(
                    collectives_together(step, [one.value for one in bucket], self.mesh.shape)
                ):
                    time_s = 0.0
                    for one in bucket:
                        alone = collectives_together(step, [one.value], self.mesh.shape)[number]
                        time_s += collective_time(self.cluster, self.mesh, alone, latency_share=one.latency_share)
                    yield PlannedCollective(where, users, collective, time_s, is_once)

    def again(self, training: Training) -> Iterator[PlannedCollective]:
        """Those that make once more, in backward, what was not kept; parameters for a later part of backward, that for
        weights, too.
        """
        for conversion, saving in self._all():
            is_in_region = saving.region != NOWHERE and conversion.value.name not in self.parameters
            if is_in_region or (conversion.is_regathered and saving.is_saved):
                num_times = 2 if training.num_waiting and saving.region == NOWHERE else 1
                steps = num_times * redistribute(conversion.src, conversion.dst)
                for collective in again_in_backward(steps, conversion.value, self.mesh.shape):
                    users = tuple(use.user for use in conversion.uses)
                    yield PlannedCollective(conversion.value.name, users, collective, self._time_s(collective))

    def inside_ops(self) -> Iterator[PlannedCollective]:
        """Those that ops issue themselves; in a region, those of forward once more in backward."""
        for op in self.graph.ops:
            for collective in inner_collectives(op, self.assignment.strategies[op.name], self.mesh.shape):
                yield PlannedCollective(op.name, (op.name,), collective, self._time_s(collective))
                if op.name in self.places and collective.phase == "forward":
                    again = replace(collective, phase="backward")
                    yield PlannedCollective(op.name, (op.name,), again, self._time_s(again))

    def memory_bytes(self, training: Training) -> dict[str, int]:
        """Bytes by kind."""
        memory: Counter[str] = Counter()
        for item in self.graph.inputs:
            memory.update(input_bytes(item, self.assignment.layouts[item.value.name], self.mesh.shape, training))
        shares = inside_shares(self.graph, self.known, self.assignment.recomputed, self.savings, training.num_waiting)
        inside = [0.0] * len(shares)
        memory["activations"] = 0
        for op in self.graph.ops:
            saved = self._saved_by(op)
            if op.name in self.places:
                inside[self.places[op.name]] += saved
            elif op.name not in self.away:
                memory["activations"] += training.num_in_flight * saved
            if training.num_waiting:
                _, outputs = local_shapes(op, self.assignment.strategies[op.name], self.mesh.shape)
                memory["waiting"] += training.num_waiting * waiting_bytes(op, outputs)
        for conversion, saving in self._all():
            kept, more, _ = self._kept_bytes(conversion, saving, training)
            memory["gathered" if conversion.value.name in self.parameters else "activations"] += kept
            if more:
                inside[saving.region] += more
        memory["recomputed"] = round(sum(share * size for share, size in zip(shares, inside)))
        memory["fetched"] = round(sum(moving.share * size for moving, size in zip(self.movings, self.moved_bytes())))
        memory["transient"] = round(self._transient(training))
        optional = ("gathered", "recomputed", "waiting", "fetched", "transient")
        return {kind: size for kind, size in memory.items() if size or kind not in optional}

    def _transient(self, training: Training) -> float:
        ops, regions = {op.name: op for op in self.graph.ops}, (self.assignment.recomputed, self.assignment.offloaded)
        found, size = largest_transient(Sampled(self.graph), self.known, *regions, training.num_microbatches), 0.0
        for name, share in found.ops.items():
            shapes = local_shapes(ops[name], self.assignment.strategies[name], self.mesh.shape)
            size += share * transient_bytes(ops[name], *shapes, frozenset(self.parameters))
        pending = (item for item in self.graph.inputs if item.value.name in found.pending)
        layouts, shape = self.assignment.layouts, self.mesh.shape
        return size - sum(input_bytes(item, layouts[item.value.name], shape, training)["gradients"] for item in pending)

    def moved_bytes(self) -> list[int]:
        """What each offloaded region sends to the host in a microbatch."""
        found = [0] * len(self.movings)
        for op in self.graph.ops:
            if is_moved(op, self.places, self.away):
                found[self.away[op.name]] += self._saved_by(op)
        for conversion, saving in self._all():
            if saving.moved_in != NOWHERE:
                found[saving.moved_in] += self._kept_bytes(conversion, saving, WHOLE_BATCH)[2]
        return found

    def _saved_by(self, op: Op) -> int:
        strategy = self.assignment.strategies[op.name]
        return saved_by_op(op, strategy, *local_shapes(op, strategy, self.mesh.shape), self.mesh.shape)

    def _kept_bytes(self, conversion: Conversion, saving: Saving, training: Training) -> tuple[int, ...]:
        name = conversion.value.name
        found = kept_bytes(
            conversion.value,
            (conversion.src,),
            (conversion.dst,),
            self.mesh.shape,
            saving,
            training,
            is_parameter=name in self.parameters,
            is_stored=conversion is self.conversions[name][0],
            again=conversion.is_regathered,
        )
        return tuple(int(each[0, 0]) for each in found)

    def _all(self) -> Iterator[tuple[Conversion, Saving]]:
        for name, of_value in self.conversions.items():
            yield from zip(of_value, self.savings[name])

    def _time_s(self, collective: Collective) -> float:
        return collective_time(self.cluster, self.mesh, collective)
