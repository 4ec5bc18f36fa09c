"""The cost of one assignment, op by op and conversion by conversion, without folding and without the table."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.costmodel.collective import collective_time
from autopar.costmodel.compute import local_shapes, op_time
from autopar.costmodel.conversion import copy_bytes
from autopar.costmodel.hardware import Cluster, check_mesh
from autopar.costmodel.inner import inner_collectives
from autopar.costmodel.memory import held_values, input_bytes, saved_by_op, update_bytes
from autopar.costmodel.probe import Footprint, footprints
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.assignment import Assignment, Conversion, buckets, conversions
from autopar.sbp.redistribute import Collective, again_in_backward, collectives_together, redistribute


@dataclass(frozen=True)
class PlannedCollective:
    """A collective the step issues, on value (of a bucket, its first; from inside an op, the op) `where`, for the ops `users`."""

    where: str
    users: tuple[str, ...]
    collective: Collective
    time_s: float


@dataclass(frozen=True)
class Costs:
    """One training step on one device. memory_bytes: kind ("parameters", "gradients", "optimizer", "buffers", "constants", "arguments",
    "activations") -> bytes."""

    compute_forward_s: float
    compute_backward_s: float
    optimizer_s: float
    collectives: tuple[PlannedCollective, ...]
    memory_bytes: Mapping[str, int]

    def communication_s(self, phase: str) -> float:
        """Seconds of the collectives of `phase`, "forward" or "backward"."""
        return sum(planned.time_s for planned in self.collectives if planned.collective.phase == phase)

    @property
    def step_s(self) -> float:
        """All of it, one after the other."""
        communication = self.communication_s("forward") + self.communication_s("backward")
        return self.compute_forward_s + self.compute_backward_s + self.optimizer_s + communication

    @property
    def total_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())


def evaluate(graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, *, training: Training = WHOLE_BATCH) -> Costs:
    """What `assignment` costs; errors as in `price`."""
    check_mesh(cluster, mesh.num_devices)
    found, known = conversions(graph, assignment), footprints(graph)
    times = [op_time(op, assignment.strategies[op.name], mesh.shape, cluster) for op in graph.ops]
    updated = sum(update_bytes(item, assignment.layouts[item.value.name], mesh.shape, training) for item in graph.inputs)
    memory: Counter[str] = Counter()
    for item in graph.inputs:
        memory.update(input_bytes(item, assignment.layouts[item.value.name], mesh.shape, training))
    memory["activations"] = _activation_bytes(graph, assignment, found, known, mesh)
    return Costs(
        compute_forward_s=sum(forward for forward, _ in times),
        compute_backward_s=sum(backward for _, backward in times),
        optimizer_s=updated / cluster.memory_bandwidth_bytes_per_s,
        collectives=(*_converting(found, mesh, cluster), *_again(found, known, mesh, cluster), *_inside(graph, assignment, mesh, cluster)),
        memory_bytes=dict(memory),
    )


def _converting(found: Mapping[str, tuple[Conversion, ...]], mesh: Mesh, cluster: Cluster) -> Iterator[PlannedCollective]:
    """Those of the conversions. A bucket takes the sum of what its members are priced at."""
    for bucket in buckets(found):
        where, users = bucket[0].value.name, tuple(use.user for conversion in bucket for use in conversion.uses)
        for step in redistribute(bucket[0].src, bucket[0].dst):
            for number, collective in enumerate(collectives_together(step, [conversion.value for conversion in bucket], mesh.shape)):
                time_s = 0.0
                for one in bucket:
                    alone = collectives_together(step, [one.value], mesh.shape)[number]
                    time_s += collective_time(cluster, mesh, alone, latency_share=one.latency_share)
                yield PlannedCollective(where, users, collective, time_s)


def _again(
    found: Mapping[str, tuple[Conversion, ...]], known: Mapping[str, Footprint], mesh: Mesh, cluster: Cluster
) -> Iterator[PlannedCollective]:
    """Those that make once more, in backward, what was not kept."""
    for conversion in (conversion for of_value in found.values() for conversion in of_value):
        if conversion.is_regathered and _is_saved(conversion, known):
            for collective in again_in_backward(redistribute(conversion.src, conversion.dst), conversion.value, mesh.shape):
                users = tuple(use.user for use in conversion.uses)
                yield PlannedCollective(conversion.value.name, users, collective, collective_time(cluster, mesh, collective))


def _is_saved(conversion: Conversion, known: Mapping[str, Footprint]) -> bool:
    return any(use.user in known and use.slot in known[use.user].saved_inputs for use in conversion.uses)


def _inside(graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster) -> Iterator[PlannedCollective]:
    """Those that ops issue themselves."""
    for op in graph.ops:
        for collective in inner_collectives(op, assignment.strategies[op.name], mesh.shape):
            yield PlannedCollective(op.name, (op.name,), collective, collective_time(cluster, mesh, collective))


def _activation_bytes(
    graph: Graph, assignment: Assignment, found: Mapping[str, tuple[Conversion, ...]], known: Mapping[str, Footprint], mesh: Mesh
) -> int:
    """What backward keeps of forward: what ops save of their own, and a copy for each conversion that an op saves the result of.

    The kept layout of a value with several uses counts as saved if any of them saves what it reads; what is regathered is not kept.
    """
    held = held_values(graph, known)
    total = sum(saved_by_op(op, *local_shapes(op, assignment.strategies[op.name], mesh.shape)) for op in graph.ops)
    for name, of_value in found.items():
        for position, conversion in enumerate(of_value):
            if _is_saved(conversion, known) and not conversion.is_regathered:
                ways = (conversion.src,), (conversion.dst,)
                total += int(copy_bytes(conversion.value, *ways, mesh.shape, is_held=position > 0 or name in held)[0, 0])
    return total
