"""The cost of one assignment, op by op and conversion by conversion, without folding and without the table."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.costmodel.collective import collective_time
from autopar.costmodel.compute import local_shapes, op_time
from autopar.costmodel.hardware import Cluster, check_mesh
from autopar.costmodel.inner import inner_collectives
from autopar.costmodel.memory import held_values, input_bytes, local_bytes, memory_layout, update_bytes
from autopar.costmodel.price import saved_by_op
from autopar.costmodel.probe import footprint
from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh
from autopar.sbp.assignment import Assignment, buckets, conversions, produced_layouts, uses_of, wanted_layout
from autopar.sbp.redistribute import Collective, collectives_together, redistribute


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


def evaluate(graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, *, optimizer: str = "adamw") -> Costs:
    """What `assignment` costs; errors as in `price`."""
    check_mesh(cluster, mesh.num_devices)
    times = [op_time(op, assignment.strategies[op.name], mesh.shape, cluster) for op in graph.ops]
    updated = sum(update_bytes(item, assignment.layouts[item.value.name], mesh.shape, optimizer) for item in graph.inputs)
    memory: Counter[str] = Counter()
    for item in graph.inputs:
        memory.update(input_bytes(item, assignment.layouts[item.value.name], mesh.shape, optimizer))
    memory["activations"] = _activation_bytes(graph, assignment, mesh)
    return Costs(
        compute_forward_s=sum(forward for forward, _ in times),
        compute_backward_s=sum(backward for _, backward in times),
        optimizer_s=updated / cluster.memory_bandwidth_bytes_per_s,
        collectives=tuple(_planned(graph, assignment, mesh, cluster)),
        memory_bytes=dict(memory),
    )


def _planned(graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster) -> Iterator[PlannedCollective]:
    for bucket in buckets(graph, conversions(graph, assignment)):
        where, users = bucket[0].value.name, tuple(use.user for conversion in bucket for use in conversion.uses)
        for step in redistribute(bucket[0].src, bucket[0].dst):
            for collective in collectives_together(step, [conversion.value for conversion in bucket], mesh.shape):
                yield PlannedCollective(where, users, collective, collective_time(cluster, mesh, collective))
    for op in graph.ops:
        for collective in inner_collectives(op, assignment.strategies[op.name], mesh.shape):
            yield PlannedCollective(op.name, (op.name,), collective, collective_time(cluster, mesh, collective))


def _activation_bytes(graph: Graph, assignment: Assignment, mesh: Mesh) -> int:
    """What backward keeps of forward; a tensor kept by several ops counts once."""
    produced, held, ops = produced_layouts(graph, assignment), held_values(graph), {op.name: op for op in graph.ops}
    values = {value.name: value for op in graph.ops for value in op.outputs} | {item.value.name: item.value for item in graph.inputs}
    total = sum(_saved_by_op(op, assignment, mesh) for op in graph.ops)
    for name, uses in uses_of(graph).items():
        savers = [use for use in uses if use.user in ops and use.slot in footprint(ops[use.user]).saved_inputs]
        kept = {memory_layout(wanted_layout(graph, assignment, use)) for use in savers}
        if name in held:
            kept -= {memory_layout(produced[name])}
        total += sum(local_bytes(values[name].shape, values[name].dtype.itemsize, layout, mesh.shape) for layout in kept)
    return round(total)


def _saved_by_op(op: Op, assignment: Assignment, mesh: Mesh) -> float:
    return saved_by_op(op, *local_shapes(op, assignment.strategies[op.name], mesh.shape))
