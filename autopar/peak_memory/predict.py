"""Prediction of the peak memory of a rank in a step, by running its generated program on tensors without data."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch

from autopar.codegen.lower import lower
from autopar.codegen.program import Program
from autopar.costmodel.activations.count_storages import RunOp, count_storages
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import input_bytes, local_bytes
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.graph import Graph, Input, Value
from autopar.mesh import Mesh
from autopar.peak_memory.device_kernels import without_data
from autopar.peak_memory.dry_run import DryStage, DryStep, Rank
from autopar.peak_memory.few_copies import Phases, run_phases
from autopar.peak_memory.replay import Recording, Replayed, likeness, recorded, run_two
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.interop.local_step import together_bytes
from autopar.runtime.offload_optimizer import buckets
from autopar.runtime.pipeline.torch_stage import Wire
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import Layout, local_shape
from autopar.schedule.orders import Schedule, arriving, receiving_kinds
from autopar.schedule.orders import actions as schedule_actions
from autopar.schedule.simulate import posted_by
from autopar.schedule.timeline import Action

Inputs = tuple[tuple[Input, Layout], ...]

# Transient tensors in an update by torch.optim, of the size of what is updated together: on a CPU one parameter after
# the other (`foreach=False`), on a GPU as `local_step` cuts them.
UPDATE_COPIES = {"adam": 2, "adamw": 2, "adagrad": 1}


@dataclass(frozen=True)
class Peak:
    """The memory of one rank in a step.

    `stored_bytes`: of tensors that exist all the time: parameters, buffers, constants, optimizer state, the batch.
    `phases`: (name, bytes at its peak) of each part of the step, in order ("gather", "0F0", "0B0", ..., "reduce",
    "update"), actions by their text.
    """

    stored_bytes: int
    phases: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        """The largest memory at any time of the step."""
        return max(num_bytes for _, num_bytes in self.phases)

    @property
    def phase(self) -> str:
        """The first phase that reaches the peak."""
        return max(self.phases, key=lambda phase: phase[1])[0]


def rank_peaks(plan: Plan | StagedPlan) -> tuple[int, ...]:
    """The peak in bytes of a device of each rank of the pipeline, or of the only one, on devices of the plan's cluster.

    One stage that runs the whole batch is no pipeline: it reduces gradients during backward, as a plan without stages.
    """
    if isinstance(plan, StagedPlan):
        if len(plan.stages) > 1 or plan.schedule.num_microbatches > 1:
            return tuple(peak.total_bytes for peak in predict_peaks(plan))
        (plan,) = plan.stages
    prediction = predict_peak(plan.graph, plan.mesh, plan.assignment, training=plan.training, on=plan.cluster)
    return (prediction.total_bytes,)


def predict_peak(
    graph: Graph,
    mesh: Mesh,
    assignment: Assignment,
    *,
    training: Training = WHOLE_BATCH,
    actions: Sequence[Action] | None = None,
    on: Cluster | str = "cpu",
    is_whole: bool = False,
) -> Peak:
    """The peak of the first rank in a step, run without peers on a device of a cluster or type (`Rank.of`).

    `graph`: of one microbatch; the received values of a stage are arguments with a gradient. `actions`: of this stage,
    in order; by default one microbatch after the other. The batch is counted whole, as plain tensors are given, but of
    what is carried from call to call the rank's part. Outputs without gradient are dropped. Only a few copies of a
    repeat are run (`run_phases`), all of them if `is_whole`.
    """
    is_split, device_type = (
        training.num_microbatches > 1 or actions is not None,
        on if isinstance(on, str) else on.device_type,
    )
    if actions is None:
        actions = [Action(kind, 0, number) for number in range(training.num_microbatches) for kind in "FB"]
    arguments = graph.of_kind("argument")
    received = {item.value.name for item in arguments if item.value.needs_grad}
    carried = {name: assignment.layouts[name] for _, name in graph.carried}
    given = (item.value for item in arguments if item.value.name not in received)
    batch = sum(
        local_bytes(x.shape, x.dtype.itemsize, carried.get(x.name, ()), mesh.shape) * training.num_microbatches
        for x in given
    )

    def run(graph: Graph, assignment: Assignment, in_buckets: bool) -> Phases:
        how = {"in_buckets": in_buckets, "is_halved": any(action.kind == "W" for action in actions)}
        program = lower(graph, mesh, assignment, is_split=is_split, **how)
        with without_data(device_type) as run_op:
            stage = DryStage(Rank.of(program, received, {}, on), is_first=not received)
            return _run({0: stage}, DryStep({0: stage}, actions, is_split=is_split), run_op)

    phases = run(graph, assignment, True) if is_whole else run_phases(graph, assignment, mesh, run)
    inputs, away = [(mesh, _laid_out(graph, assignment))], _on_host(graph, assignment)
    return _peak(inputs, phases, training, batch, {}, away, device_type)


def predict_peaks(plan: StagedPlan, *, is_whole: bool = False) -> tuple[Peak, ...]:
    """The peak of each rank of the pipeline, with all its stages and in the order of its schedule.

    The devices are those of the plan's cluster. Of isomorphic stages one is run, for two microbatches, and its
    allocation trace is replayed; if `is_whole`, all stages are run for all microbatches.
    """
    made = {value.name for stage in plan.stages for op in stage.graph.ops for value in op.outputs}
    receives = [{item.value.name for item in stage.graph.of_kind("argument")} & made for stage in plan.stages]
    batch = sum(item.value.num_bytes for item in plan.graph.of_kind("argument"))
    slices = _slices(plan)
    peaks, posted = [], posted_by(plan.schedule)
    recordings = None if is_whole else _recordings(plan, receives)
    for rank, actions in enumerate(schedule_actions(plan.schedule)):
        state: dict[str, torch.Tensor] = {}
        with without_data(plan.cluster.device_type if is_whole else "meta") as run_op:
            stages = {
                number: (
                    _replayed(plan, number, receives[number], state, recordings[number])
                    if recordings
                    else _stage(plan, number, receives[number], state)
                )
                for number in plan.schedule.stages_of(rank)
            }
            arrivals, tied = _arrivals(plan.schedule, rank), _tied(plan, rank)
            step = DryStep(stages, actions, arrivals=arrivals, posted_by=posted[rank], tied=tied)
            own = [plan.stages[number] for number in stages]
            away = {fqn for stage in own for fqn in _on_host(stage.graph, stage.assignment)}
            inputs = [(stage.mesh, _laid_out(stage.graph, stage.assignment)) for stage in own]
            phases, device_type = _run(stages, step, run_op), plan.cluster.device_type
            peaks.append(_peak(inputs, phases, plan.training, batch, slices, away, device_type))
    return tuple(peaks)


def _recordings(plan: StagedPlan, receives: Sequence[Collection[str]]) -> list[Recording]:
    """The recording of each stage; isomorphic stages are run once."""
    known: dict[Hashable, Recording] = {}
    recordings = []
    for number, own in enumerate(plan.stages):
        key = likeness(own, receives[number], *_where(plan, number).values())
        if key not in known:
            known[key] = _recorded(plan, number, receives[number])
        recordings.append(known[key])
    return recordings


def _recorded(plan: StagedPlan, number: int, receives: Collection[str]) -> Recording:
    own, is_halved, handed = plan.stages[number], plan.schedule.is_halved, []

    def run(graph: Graph, assignment: Assignment, in_buckets: bool) -> Phases:
        program = lower(graph, own.mesh, assignment, is_split=True, in_buckets=in_buckets, is_halved=is_halved)
        with without_data(plan.cluster.device_type) as run_op:
            stage = DryStage(Rank.of(program, receives, {}, own.cluster), **_where(plan, number))
            phases, outputs = run_two(stage, is_halved=is_halved, run=run_op)
        handed.append(outputs)
        return phases

    return recorded(run_phases(own.graph, own.assignment, own.mesh, run), handed[-1])


def _stage(plan: StagedPlan, number: int, receives: Collection[str], state: dict[str, torch.Tensor]) -> DryStage:
    """The stage called `number`, to be run; `state`: as in `Rank.of`."""
    own = plan.stages[number]
    program = lower(own.graph, own.mesh, own.assignment, is_split=True, is_halved=plan.schedule.is_halved)
    return DryStage(Rank.of(program, receives, state, own.cluster), **_where(plan, number))


def _replayed(
    plan: StagedPlan, number: int, receives: Collection[str], state: dict[str, torch.Tensor], recording: Recording
) -> Replayed:
    own = plan.stages[number]
    rank = Rank.of(
        Program(own.mesh, _laid_out(own.graph, own.assignment), (), (), ()), receives, state, plan.cluster.device_type
    )
    return Replayed(rank, **_where(plan, number), recording=recording)


def _slices(plan: StagedPlan) -> dict[str, int]:
    """Name of each input that is sliced into microbatches -> number of slices."""
    whole = {item.value.name: item.value for item in plan.graph.inputs}
    parts = {
        item.value.name: item.value for stage in plan.stages for item in stage.graph.inputs if item.value.name in whole
    }
    return {name: plan.schedule.num_microbatches for name, part in parts.items() if part.shape != whole[name].shape}


class _Where(TypedDict):
    is_first: bool
    sends: tuple[Wire, ...]


def _where(plan: StagedPlan, number: int) -> _Where:
    stage, is_last = plan.stages[number], number == plan.schedule.num_stages - 1
    values = () if is_last else tuple(value for value in stage.graph.outputs if isinstance(value, Value))
    layouts, shape = stage.assignment.outputs, stage.mesh.shape
    sends = (Wire(local_shape(x.shape, layouts[x.name], shape), x.dtype, x.needs_grad) for x in values)
    return {"is_first": number == 0, "sends": tuple(sends)}


def _arrivals(schedule: Schedule, rank: int) -> dict[int, list[Action]]:
    """Index of an action of the rank -> the "F" and "B" actions whose receive buffers are allocated as it begins.

    The first buffers come with the first action, each other one with the action that needs the one before
    (`receive_ahead.Inbox`).
    """
    position = {action: index for index, action in enumerate(schedule_actions(schedule)[rank])}
    arrivals: dict[int, list[Action]] = {}
    for kind in receiving_kinds(schedule):
        row = arriving(schedule, rank, kind)
        for before, action in zip((None, *row), row):
            posted = 0 if before is None else position[before]
            arrivals.setdefault(posted, []).append(action if kind == "F" else action._replace(kind="B"))
    return arrivals


def _tied(plan: StagedPlan, rank: int) -> dict[str, int]:
    """FQN of each trained parameter of the rank that other ranks hold too -> number of these ranks."""
    holders: dict[str, set[int]] = {}
    for number, stage in enumerate(plan.stages):
        for item in stage.graph.of_kind("parameter"):
            if item.value.needs_grad:
                holders.setdefault(item.fqn, set()).add(plan.schedule.rank_of(number))
    return {fqn: len(ranks) - 1 for fqn, ranks in holders.items() if rank in ranks and len(ranks) > 1}


def _on_host(graph: Graph, assignment: Assignment) -> set[str]:
    """FQNs of the parameters whose optimizer state is on the host."""
    return {item.fqn for item in graph.of_kind("parameter") if item.value.name in assignment.state_on_host}


def _laid_out(graph: Graph, assignment: Assignment) -> Inputs:
    return tuple((item, assignment.layouts[item.value.name]) for item in graph.inputs)


def _run(stages: Mapping[int, DryStage], step: DryStep, run: RunOp) -> Phases:
    held = {id(x): x for stage in stages.values() for x in stage.rank.tensors()}
    with count_storages(held.values(), run) as storages:
        return step.run(storages)


_IN_STEP = ("gradients", "casts")  # kinds that a step allocates


def _peak(
    inputs: Sequence[tuple[Mesh, Inputs]],
    phases: Phases,
    training: Training,
    batch_bytes: int,
    slices: Mapping[str, int],
    on_host: Collection[str],
    device_type: str,
) -> Peak:
    """The peak of a rank; `inputs`: (mesh, inputs) of each of its stages, `slices`: as `_slices` gives them."""
    kinds = _bytes_of(inputs, training, slices)
    stored = batch_bytes + sum(sum(own.values()) - sum(own.get(x, 0) for x in _IN_STEP) for own in kinds.values())
    stored -= sum(kinds[fqn]["optimizer"] for fqn in on_host)
    peaks, now, beside = [], stored, _beside_backward(phases)
    for name, changes in phases:
        peaks.append((name, now + _most(changes) + beside.get(name, 0)))
        now += int(changes.sum())
    return Peak(stored, (*peaks, ("update", stored + _update_bytes(kinds, on_host, training, device_type))))


def _most(changes: np.ndarray) -> int:
    return max(0, int(np.cumsum(changes).max(initial=0)))


def _beside_backward(phases: Phases) -> dict[str, int]:
    """Phase -> bytes of the reductions that begin in it, at most, and are counted as "reduce": the last backward of
    each stage, unless weight gradients are put off (`accumulate.OpenStep`).
    """
    reduced = max((_most(changes) for name, changes in phases if name == "reduce"), default=0)
    last = {}
    for name, _ in phases:
        stage, _, microbatch = name.partition("B")
        if stage.isdigit() and microbatch.isdigit():
            last[stage] = name
    return dict.fromkeys(last.values(), reduced) if reduced else {}


def _update_bytes(
    kinds: Mapping[str, Mapping[str, int]], on_host: Collection[str], training: Training, device_type: str
) -> int:
    """Bytes during the update beyond stored ones: all gradients, transient copies, and a bucket of offloaded state."""
    copies = UPDATE_COPIES.get(training.optimizer, 0)
    gradients = {name: own["gradients"] for name, own in kinds.items() if "gradients" in own}
    sizes = [size for name, size in gradients.items() if name not in on_host]
    staying = copies * (max(sizes, default=0) if device_type == "cpu" else together_bytes(sizes))
    moved = [name for name in kinds if name in on_host]
    each = ([moved[at] for at in bucket] for bucket in buckets([kinds[name]["parameters"] for name in moved]))
    moving = (
        sum(kinds[name]["optimizer"] for name in bucket) + copies * max(gradients[name] for name in bucket)
        for bucket in each
    )
    return sum(gradients.values()) + max(staying, *moving, 0)


def _bytes_of(
    inputs: Sequence[tuple[Mesh, Inputs]], training: Training, slices: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """FQN or other name -> kind -> bytes of all stored inputs but the batch, and of gradients.

    An input that several stages read is counted once.
    """
    sizes: dict[str, dict[str, int]] = {}
    for number, (mesh, own) in enumerate(inputs):
        for item, layout in own:
            if item.kind != "argument":
                name = item.fqn if item.kind in ("parameter", "buffer") else f"{number}:{item.value.name}"
                num = slices.get(item.value.name, 1)
                sizes[name] = {kind: x * num for kind, x in input_bytes(item, layout, mesh.shape, training).items()}
    return sizes
