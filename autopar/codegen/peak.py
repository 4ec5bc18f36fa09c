"""The most memory that one rank has in use during a step: its generated program is run on tensors without data, which are counted."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # ops choose kernels by device: fakes say "cpu", meta tensors would choose others
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from autopar.codegen.emit import emit
from autopar.codegen.load import compile_source, namespace
from autopar.codegen.lower import lower
from autopar.codegen.offload import Offload
from autopar.codegen.pipeline_stage import MOST_ON_THE_WAY_BACK, depends, sendable
from autopar.codegen.program import Program
from autopar.codegen.step import close_step, open_step
from autopar.codegen.storages import Storages, count_storages
from autopar.costmodel.memory import input_bytes
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.graph import Graph, Input
from autopar.mesh import Mesh
from autopar.plan.schedule import IN_ROUNDS, Schedule
from autopar.plan.schedule import actions as schedule_actions
from autopar.plan.staged import StagedPlan, stage_graphs
from autopar.plan.timeline import Action
from autopar.sbp.assignment import Assignment
from autopar.sbp.collectives import Axis, joint_axis
from autopar.sbp.placement import Layout, local_shape

# Tensors as large as a parameter that its update makes for a moment: torch.optim, one parameter after the other (`foreach=False`).
UPDATE_COPIES = {"adam": 2, "adamw": 2, "adagrad": 1}


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank. `stored_bytes`: what is there all the time: parameters, buffers, constants, optimizer state, the batch. `phases`:
    the most at one time of each part of the step, in order ("gather", "0F0", "0B0", ..., "reduce", "update"), actions as they print."""

    stored_bytes: int
    phases: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        """The most at one time."""
        return max(num_bytes for _, num_bytes in self.phases)

    @property
    def phase(self) -> str:
        """The first in which it is reached."""
        return max(self.phases, key=lambda phase: phase[1])[0]


def predict_peak(
    graph: Graph, mesh: Mesh, assignment: Assignment, *, training: Training = WHOLE_BATCH, actions: Sequence[Action] | None = None
) -> Peak:
    """Run a step of the program as the first rank would, without peers.

    graph: of one microbatch; of a stage what it receives is an argument with a gradient. actions: of this stage, in order; by default one
    microbatch after the other. The batch is counted whole, as plain tensors are handed in. Outputs that lead to no gradient are dropped.
    """
    is_split = training.num_microbatches > 1 or actions is not None
    if actions is None:
        actions = [Action(kind, 0, number) for number in range(training.num_microbatches) for kind in "FB"]
    arguments = graph.of_kind("argument")
    received = {item.value.name for item in arguments if item.value.needs_grad}
    batch = sum(item.value.num_bytes for item in arguments if item.value.name not in received) * training.num_microbatches
    program = lower(graph, mesh, assignment, is_split=is_split)
    with FakeTensorMode():
        stage = _Stage(_Rank.of(program, received, {}), is_first=not received)
        return _peak({0: stage}, _Step({0: stage}, actions, is_split=is_split), training, batch, {})


def predict_peaks(plan: StagedPlan) -> tuple[Peak, ...]:
    """The peak of each rank of the pipeline, with all its stages, in the order of its schedule."""
    micro, graphs = stage_graphs(plan.graph, plan.starts, plan.schedule.num_microbatches)
    batch = sum(item.value.num_bytes for item in plan.graph.of_kind("argument"))
    slices = {name: plan.schedule.num_microbatches for name, placement in micro.placements.items() if placement.is_split}
    in_rounds, found = plan.schedule.name in IN_ROUNDS, []
    arrivals = _arrivals(plan.schedule) if in_rounds else [{}] * plan.schedule.num_ranks
    for rank, actions in enumerate(schedule_actions(plan.schedule)):
        state: dict[str, torch.Tensor] = {}
        with FakeTensorMode():
            stages = {}
            for number in plan.schedule.stages_of(rank):
                own, last = plan.stages[number], plan.schedule.num_stages - 1
                program = lower(own.graph, own.mesh, own.assignment, is_split=True, alike=micro.alike)
                stages[number] = _Stage(_Rank.of(program, graphs[number].receives, state), is_first=not number, sends=number < last)
            step = _Step(stages, actions, in_rounds=in_rounds, arrivals=arrivals[rank], tied=_tied(plan, rank))
            found.append(_peak(stages, step, plan.training, batch, slices))
    return tuple(found)


def _arrivals(schedule: Schedule) -> list[dict[int, list[Action]]]:
    """Of each rank: what "F" and "B" get from other stages -> before which action, by its index, there is room for it.

    torch's schedules in rounds take a step together: what one sends in it the other receives before its next, even if it needs it later.
    """
    rows, last = schedule_actions(schedule), schedule.num_stages - 1
    at, done = [0] * len(rows), set()
    found: list[dict[int, list[Action]]] = [{} for _ in rows]
    while any(here < len(row) for here, row in zip(at, rows)):
        ran = [(rank, row[here]) for rank, (here, row) in enumerate(zip(at, rows)) if here < len(row) and _needs(row[here], last) <= done]
        assert ran, f"{schedule}: no rank can go on"
        for rank, action in ran:
            at[rank] += 1
            done.add(_sent(action))
        for sent in (_sent(action) for _, action in ran):
            if sent.kind != "W" and 0 <= sent.stage <= last:
                rank = schedule.rank_of(sent.stage)
                found[rank].setdefault(at[rank], []).append(sent)
    return found


def _sent(action: Action) -> Action:
    """The action of another stage for which this makes something."""
    if action.kind == "W":
        return action
    return action._replace(stage=action.stage + 1) if action.kind == "F" else Action("B", action.stage - 1, action.microbatch)


def _needs(action: Action, last: int) -> set[Action]:
    if action.kind == "W" or action.stage == (0 if action.kind == "F" else last):
        return set()
    return {action._replace(kind="F" if action.kind == "F" else "B")}


def _tied(plan: StagedPlan, rank: int) -> dict[str, int]:
    """FQN of each trained parameter of the rank that others hold too -> how many others."""
    holders: dict[str, set[int]] = {}
    for number, stage in enumerate(plan.stages):
        for item in stage.graph.of_kind("parameter"):
            if item.value.needs_grad:
                holders.setdefault(item.fqn, set()).add(plan.schedule.rank_of(number))
    return {fqn: len(ranks) - 1 for fqn, ranks in holders.items() if rank in ranks and len(ranks) > 1}


def _peak(stages: Mapping[int, "_Stage"], step: "_Step", training: Training, batch_bytes: int, slices: Mapping[str, int]) -> Peak:
    """slices: constants of which the graph reads one part of so many."""
    ranks = [stage.rank for stage in stages.values()]
    held = {id(x): x for rank in ranks for x in rank.tensors()}
    with count_storages(held.values()) as storages:
        phases = step.run(storages)
    stored, gradients = _bytes_of(ranks, training, slices)
    stored += batch_bytes
    beside = stored - sum(x.untyped_storage().nbytes() for x in held.values())
    update = sum(gradients) + UPDATE_COPIES.get(training.optimizer, 0) * max(gradients, default=0)
    return Peak(stored, (*((name, beside + num_bytes) for name, num_bytes in phases), ("update", stored + update)))


def _bytes_of(ranks: Sequence["_Rank"], training: Training, slices: Mapping[str, int]) -> tuple[int, list[int]]:
    """What is there all the time but the batch, and the gradients of the parameters; what several stages read counts once."""
    found: dict[str, dict[str, int]] = {}
    for number, rank in enumerate(ranks):
        for item, layout in rank.program.inputs:
            if item.kind != "argument":
                name = item.fqn if item.kind in ("parameter", "buffer") else f"{number}:{item.value.name}"
                num = slices.get(item.value.name, 1)
                found[name] = {kind: x * num for kind, x in input_bytes(item, layout, rank.program.mesh.shape, training).items()}
    gradients = [kinds.get("gradients", 0) for kinds in found.values()]
    return sum(sum(kinds.values()) for kinds in found.values()) - sum(gradients), gradients


@dataclass
class _Rank:
    """`self` of the generated functions, as `load.Loaded`, with tensors that have no data. `receives`: names of the arguments that come
    from another stage, for each microbatch anew."""

    program: Program
    function: Any
    gather: Any
    axes: tuple[Axis, ...]
    receives: Collection[str]
    state: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    used: dict[str, torch.Tensor]

    @classmethod
    def of(cls, program: Program, receives: Collection[str], state: dict[str, torch.Tensor]) -> "_Rank":
        """`state`: parameters and buffers of the rank's stages before, by FQN, to which this one's are added."""
        names, mesh = namespace() | {"Offload": _Away}, program.mesh
        function = compile_source(emit(program), names)
        single = [Axis(name, size, 0, None) for name, size in zip(mesh.axis_names, mesh.shape)]
        joint = [joint_axis([single[axis] for axis in axes], None) for axes in program.joint_axes]
        stored = [(item, _part(item, layout, mesh)) for item, layout in program.inputs if item.value.name not in receives]
        for item, part in stored:
            if item.kind in ("parameter", "buffer"):
                state.setdefault(item.fqn, part)
        constants, batch = ({item.value.name: part for item, part in stored if item.kind == kind} for kind in ("constant", "argument"))
        return cls(program, function, names.get("gather"), (*single, *joint), receives, state, constants, batch, {})

    def tensors(self) -> list[torch.Tensor]:
        """Those that are there all the time."""
        return [*self.state.values(), *self.constants.values(), *self.batch.values()]

    def local(self, fqn: str) -> torch.Tensor:
        return self.state[fqn]

    def local_copy(self, fqn: str) -> torch.Tensor:
        return self.state[fqn].clone()

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        """Takes no memory."""

    def draw_seed(self) -> int:
        return 0

    @property
    def step_seed(self) -> int:
        return 0

    def received(self) -> dict[str, torch.Tensor]:
        """Buffers for one microbatch."""
        inputs, shape = self.program.inputs, self.program.mesh
        return {item.value.name: _part(item, layout, shape) for item, layout in inputs if item.value.name in self.receives}

    def run(self, received: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """One microbatch, the same batch each time."""
        values = self.batch | dict(received)
        return self.function(self, *(values[item.value.name] for item, _ in self.program.inputs if item.kind == "argument"))


class _Away(Offload):
    """What waits on the host does not count until it is back."""

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    def _bring(self, copy: Any) -> torch.Tensor:
        return torch.empty(copy.num_bytes, dtype=torch.uint8)


def _part(item: Input, layout: Layout, mesh: Mesh) -> torch.Tensor:
    needs_grad = item.value.needs_grad and item.kind != "buffer"
    return torch.empty(local_shape(item.value.shape, layout, mesh.shape), dtype=item.value.dtype, requires_grad=needs_grad)


Tensors = list[torch.Tensor]


@dataclass
class _Stage:
    """What torch's stage does and holds: `arrived`, buffers made already for an action; `flying`, by microbatch, outputs and what
    was received; `halved`, what waits for "W"."""

    rank: _Rank
    is_first: bool = True
    sends: bool = False
    arrived: dict[Action, Any] = field(default_factory=dict)
    flying: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)
    halved: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def receive(self, action: Action) -> Any:
        """The buffers for what an action gets from another stage; those made before if there are."""
        if action in self.arrived:
            return self.arrived.pop(action)
        if action.kind == "F":
            return self.rank.received()
        outputs = self.flying[action.microbatch][0]
        is_loss = not self.sends and all(x.numel() == 1 for x in outputs)
        return None if is_loss else [torch.empty_like(x) if x.requires_grad else None for x in outputs]

    def forward(self, action: Action) -> Tensors:
        """The outputs, which are kept until the backward."""
        received = self.receive(action)
        found = [x for x in self.rank.run(received) if isinstance(x, torch.Tensor)]
        outputs = [sendable(x) for x in found] if self.sends else _differentiated(found)
        self.flying[action.microbatch] = outputs, list(received.values())
        return outputs

    def backward(self, action: Action) -> tuple[Tensors, Tensors]:
        """Whole, or its part for the inputs: the gradients that came, and those that go to the stage before."""
        came = self.receive(action._replace(kind="B"))
        outputs, received = self.flying.pop(action.microbatch)
        is_whole, groups = action.kind == "B", None
        if not is_whole and self.is_first:
            gone = ()
        elif is_whole or not all(depends(x, received) for x in outputs if x.requires_grad):
            gone = _backward(outputs, came, received)
            outputs = []
        else:
            gone, groups = stage_backward_input(outputs, came, received, iter(self._leaves()))
        if not is_whole:
            self.halved[action.microbatch] = outputs, came, received, groups
        return [x for x in came or () if x is not None], [x.contiguous() for x in gone if x is not None]

    def weights(self, action: Action) -> None:
        """The rest of the backward."""
        outputs, came, received, groups = self.halved.pop(action.microbatch)
        if groups is not None:
            stage_backward_weight(iter(self._leaves()), groups)
        elif self.is_first:
            _backward(outputs, came, received)

    def _leaves(self) -> Tensors:
        return [x for x in self.rank.used.values() if x.requires_grad]


@dataclass
class _Step:
    """A step of a rank. What torch's schedules hold besides is held as long: those in rounds the gradients on their way back, the others
    what was received and sent last. arrivals: as `_arrivals` of the rank. `tied`: FQN of what other ranks of the pipeline hold too -> how
    many."""

    stages: Mapping[int, _Stage]
    actions: Sequence[Action]
    is_split: bool = True
    in_rounds: bool = False
    arrivals: Mapping[int, Sequence[Action]] = field(default_factory=dict)
    tied: Mapping[str, int] = field(default_factory=dict)

    def run(self, storages: Storages) -> list[tuple[str, int]]:
        """The phases but the update, and their peaks without what is stored."""
        phases: list[tuple[str, int]] = []
        storages.restart()
        ranks = [stage.rank for stage in self.stages.values()]
        opened = [(rank, open_step(rank)) for rank in ranks if self.is_split]
        if self.is_split:
            phases.append(("gather", storages.restart()))
        self._act(phases, storages)
        for rank, results in opened:
            close_step(rank, results)
        if self.is_split:
            phases.append(("reduce", storages.restart()))
        for fqn, num in self.tied.items():
            # The others' gradients, and the sum, of which there may be two for a moment.
            size = ranks[0].state[fqn].untyped_storage().nbytes()
            phases.append((f"tied {fqn}", storages.num_bytes + size * (num + min(num, 2))))
        return phases

    def _act(self, phases: list[tuple[str, int]], storages: Storages) -> None:
        back: deque[Tensors] = deque(maxlen=MOST_ON_THE_WAY_BACK if self.in_rounds else 1)
        last: dict[str, Tensors] = {}
        for index, action in enumerate(self.actions):
            for arrival in self.arrivals.get(index, ()):
                here = self.stages[arrival.stage]
                here.arrived[arrival] = here.receive(arrival)
            stage = self.stages[action.stage]
            if action.kind == "F":
                last["sent"] = stage.forward(action)
            elif action.kind == "W":
                stage.weights(action)
            else:
                came, gone = stage.backward(action)
                back.append(gone)
                last["came"] = [] if self.in_rounds else came
                del came, gone
            phases.append((str(action), storages.restart()))


def _backward(outputs: Tensors, came: Sequence[Any] | None, received: Tensors) -> Sequence[Any]:
    if not any(x.requires_grad for x in outputs):
        return ()  # nothing is trained
    return stage_backward(outputs, came or [None] * len(outputs), received)


def _differentiated(outputs: Tensors) -> Tensors:
    """The loss, which is a scalar; of a stage that has none, all that a gradient comes back for."""
    found = [x for x in outputs if x.requires_grad]
    return [x for x in found if not x.shape][:1] or found
