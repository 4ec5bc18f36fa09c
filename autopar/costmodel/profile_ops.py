"""`profile`: the costs of an assignment op by op, from which a pipeline is cut into stages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.collective_time import collective_time
from autopar.costmodel.memory import input_bytes, input_update_s, local_bytes, memory_layout
from autopar.costmodel.roofline import local_shapes, splitting_s, weight_share
from autopar.costmodel.state_offload import brought_shares, moving_s, optimizer_bytes
from autopar.costmodel.step_cost import ConversionCost, step_cost
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.analysis.sampled_graph import Sampled
from autopar.sbp.assignment import Assignment, produced_layouts

_SECONDS = "forward_s", "backward_s", "weight_s", "splitting_s", "regathering_s", "collective_s"
_BY_OP = *_SECONDS, "saved_bytes", "waiting_bytes"


@dataclass(frozen=True, eq=False)
class Shared:
    """A parameter or buffer that the ops at `positions` read; each stage with one of them holds it."""

    positions: tuple[int, ...]
    state_bytes: float
    once_s: float


@dataclass(frozen=True, eq=False)
class Profile:
    """The costs of an assignment by op, f64[ops] each.

    `forward_s`, `backward_s`: of one microbatch, collectives included. `weight_s`: the part of backward for weight
    gradients, which zero-bubble schedules put off. A backward in two parts takes longer by `splitting_s`, for weight
    gradients, and `regathering_s`, of parameters. `collective_s`: the part of both passes in collectives. `once_s`:
    gathers, gradient reductions and updates of parameters, once a step, at their only reader. `state_bytes`:
    parameters, gradients, optimizer state and gathered copies, at the only reader too, and the largest transient.
    `saved_bytes`: saved for the backward of a microbatch. `waiting_bytes`: kept while only weight gradients are to be
    computed. `crossing_bytes`: of the values made before the op and read by it or later.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    splitting_s: np.ndarray
    regathering_s: np.ndarray
    collective_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    waiting_bytes: np.ndarray
    crossing_bytes: np.ndarray
    shared: tuple[Shared, ...] = field(default=())


def profile(
    graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, *, training: Training = WHOLE_BATCH
) -> Profile:
    """The profile of `assignment` on one device, as if it recomputed and offloaded nothing.

    It is for one microbatch, for any number in flight. With several microbatches, gathered parameters and their
    accumulated gradients are kept for all of them.
    """
    training = replace(training, num_in_flight=1, num_waiting=0)
    step = step_cost(Sampled(graph), replace(assignment, recomputed=(), offloaded=()), mesh, cluster, training)
    number = {op.name: position for position, op in enumerate(graph.ops)}
    columns = {name: np.zeros(len(graph.ops)) for name in _BY_OP}
    for position, op in enumerate(graph.ops):
        cost, shapes = step.ops[op.name], local_shapes(op, assignment.strategies[op.name], mesh.shape)
        columns["splitting_s"][position] += splitting_s(op, *shapes, cluster)
        columns["forward_s"][position] += cost.forward_s
        columns["backward_s"][position] += cost.backward_s
        columns["weight_s"][position] += cost.backward_s * weight_share(op)
        columns["waiting_bytes"][position] += cost.waiting_bytes
        columns["saved_bytes"][position] += cost.saved_bytes
        for collective in cost.collectives:
            time_s = collective_time(cluster, mesh, collective)
            columns[f"{collective.phase}_s"][position] += time_s
            columns["collective_s"][position] += time_s
    stored = {item.value.name: [0.0, 0.0] for item in graph.inputs}  # bytes and seconds a step of each input
    for cost in step.all_conversions():
        times = _times(cost, mesh, cluster)
        if cost.runs.is_once:
            stored[cost.conversion.value.name][0] += cost.kept_bytes
            stored[cost.conversion.value.name][1] += sum(times.values())
            continue
        readers = [number[use.user] for use in cost.conversion.uses if use.user in number]
        position = min(readers, default=len(graph.ops) - 1)
        columns["saved_bytes"][position] += cost.kept_bytes
        for phase, time_s in times.items():
            columns[f"{phase}_s"][position] += time_s
        columns["collective_s"][position] += times["forward"] + times["backward"]
    once_s, state_bytes, shared = _of_inputs(graph, assignment, mesh, cluster, training, number, stored, step.pending)
    for name, size in step.transients.items():
        state_bytes[number[name]] += size
    crossing_bytes = _crossing(graph, assignment, mesh, number)
    return Profile(once_s=once_s, state_bytes=state_bytes, shared=shared, crossing_bytes=crossing_bytes, **columns)


def _times(cost: ConversionCost, mesh: Mesh, cluster: Cluster) -> dict[str, float]:
    """Seconds of the conversion in forward, in backward, and of its repetition in a split backward."""
    times = {"forward": 0.0, "backward": 0.0}
    for collective in cost.collectives:
        times[collective.phase] += cost.time_s(collective, mesh, cluster)
    again_s = sum(cost.time_s(collective, mesh, cluster) for collective in cost.runs.num_again * cost.again)
    return {"forward": times["forward"], "backward": times["backward"] + again_s, "regathering": again_s}


def _of_inputs(
    graph: Graph,
    assignment: Assignment,
    mesh: Mesh,
    cluster: Cluster,
    training: Training,
    number: Mapping[str, int],
    stored: Mapping[str, list[float]],
    pending: frozenset[str],
) -> tuple[np.ndarray, np.ndarray, tuple[Shared, ...]]:
    """(once_s and state_bytes of inputs with one reader, inputs with several readers)."""
    once_s, state_bytes, shared = np.zeros(len(graph.ops)), np.zeros(len(graph.ops)), []
    uses, brought = graph.uses, brought_shares(graph, assignment.state_on_host)
    for item in graph.inputs:
        layout = assignment.layouts[item.value.name]
        gathered_bytes, gathered_s = stored[item.value.name]
        kinds = input_bytes(item, layout, mesh.shape, training)
        held = sum(kinds.values()) - (kinds["gradients"] if item.value.name in pending else 0) + gathered_bytes
        time_s = input_update_s(item, layout, mesh.shape, training, cluster) + gathered_s
        if item.value.name in brought:
            state = optimizer_bytes(item, layout, mesh.shape, training)
            held -= (1 - brought[item.value.name]) * state
            time_s += moving_s(state, cluster)
        positions = sorted({number[use.user] for use in uses.get(item.value.name, ()) if use.user in number}) or [0]
        if len(positions) > 1:
            shared.append(Shared(tuple(positions), held, time_s))
        else:
            state_bytes[positions[0]] += held
            once_s[positions[0]] += time_s
    return once_s, state_bytes, tuple(shared)


def _crossing(graph: Graph, assignment: Assignment, mesh: Mesh, number: Mapping[str, int]) -> np.ndarray:
    produced = produced_layouts(graph, assignment)
    change = np.zeros(len(graph.ops) + 2)
    for value, made, read in _lifetimes(graph, number):
        size = local_bytes(value.shape, value.dtype.itemsize, memory_layout(produced[value.name]), mesh.shape)
        change[made + 1] += size
        change[read + 1] -= size
    return np.cumsum(change)[: len(graph.ops)]


def _lifetimes(graph: Graph, number: Mapping[str, int]) -> Iterator[tuple]:
    """(value, position of its op, position of its last reader); each reader recomputes values without gradient."""
    uses = graph.uses
    for position, op in enumerate(graph.ops):
        for value in op.outputs:
            readers = [number.get(use.user, len(graph.ops) - 1) for use in uses.get(value.name, ())]
            if readers and value.needs_grad:
                yield value, position, max(readers)
