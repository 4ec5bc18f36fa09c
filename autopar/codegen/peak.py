"""The most memory that one rank has in use during a step: its generated program is run on tensors without data, which are counted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # ops choose kernels by device: fakes say "cpu", meta tensors would choose others

from autopar.codegen.emit import emit
from autopar.codegen.load import compile_source, namespace
from autopar.codegen.lower import lower
from autopar.codegen.offload import Offload
from autopar.codegen.program import Program
from autopar.codegen.step import close_step, open_step
from autopar.codegen.storages import Storages, count_storages
from autopar.costmodel.memory import input_bytes
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.graph import Graph, Input
from autopar.mesh import Mesh
from autopar.plan.schedule import actions as schedule_actions
from autopar.plan.staged import StagedPlan
from autopar.sbp.assignment import Assignment
from autopar.sbp.collectives import Axis, joint_axis
from autopar.sbp.placement import Layout, local_shape

# Tensors as large as a parameter that its update makes for a moment: torch.optim, one parameter after the other (`foreach=False`).
UPDATE_COPIES = {"adam": 2, "adamw": 2, "adagrad": 1}

Action = tuple[str, int]  # kind, as in `plan.schedule.actions`, and microbatch


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank. `stored_bytes`: what is there all the time: parameters, buffers, constants, optimizer state, the batch. `phases`:
    the most at one time of each part of the step, in order ("gather", "F0", "B0", ..., "reduce", "update")."""

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
    microbatch after the other. A backward in two parts, "I" and "W", is taken to let go of nothing before the second. The batch is counted
    whole, as plain tensors are handed in. Outputs that lead to no gradient are dropped.
    """
    is_split = training.num_microbatches > 1 or actions is not None
    program = lower(graph, mesh, assignment, is_split=is_split)
    if actions is None:
        actions = [action for number in range(training.num_microbatches) for action in (("F", number), ("B", number))]
    with FakeTensorMode():
        rank = _Rank.of(program)
        with count_storages(rank.tensors()) as storages:
            phases = _Step(rank, storages).run(actions, is_split=is_split)
    stored = [_stored_bytes(item, layout, mesh, training) for item, layout in program.inputs]
    beside = sum(stored) - sum(tensor.untyped_storage().nbytes() for tensor in rank.tensors())
    found = [input_bytes(item, layout, mesh.shape, training).get("gradients", 0) for item, layout in program.inputs]
    update = sum(found) + UPDATE_COPIES.get(training.optimizer, 0) * max(found, default=0)
    return Peak(sum(stored), (*((name, beside + num_bytes) for name, num_bytes in phases), ("update", sum(stored) + update)))


def predict_peaks(plan: StagedPlan) -> tuple[Peak, ...]:
    """The peak of each stage by itself; a rank with several stages holds at most their sum."""
    rows = schedule_actions(plan.schedule)
    found = []
    for number, stage in enumerate(plan.stages):
        own = [(one.kind, one.microbatch) for one in rows[plan.schedule.rank_of(number)] if one.stage == number]
        found.append(predict_peak(stage.graph, stage.mesh, stage.assignment, training=stage.training, actions=own))
    return tuple(found)


def _stored_bytes(item: Input, layout: Layout, mesh: Mesh, training: Training) -> int:
    if item.kind == "argument":
        return 0 if item.value.needs_grad else item.value.num_bytes * training.num_microbatches
    found = input_bytes(item, layout, mesh.shape, training)
    return sum(num_bytes for kind, num_bytes in found.items() if kind != "gradients")


@dataclass
class _Rank:
    """`self` of the generated functions, as `load.Loaded`, with tensors that have no data."""

    program: Program
    function: Any
    gather: Any
    axes: tuple[Axis, ...]
    state: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    used: dict[str, torch.Tensor]

    @classmethod
    def of(cls, program: Program) -> "_Rank":
        names, mesh = namespace() | {"Offload": _Away}, program.mesh
        function = compile_source(emit(program), names)
        single = [Axis(name, size, 0, None) for name, size in zip(mesh.axis_names, mesh.shape)]
        joint = [joint_axis([single[axis] for axis in axes], None) for axes in program.joint_axes]
        stored = [(item, _part(item, layout, mesh)) for item, layout in program.inputs if not _is_received(item)]
        return cls(
            program, function, names.get("gather"), (*single, *joint),
            {item.fqn: part for item, part in stored if item.kind in ("parameter", "buffer")},
            *({item.value.name: part for item, part in stored if item.kind == kind} for kind in ("constant", "argument")), {},
        )  # fmt: skip

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

    def arguments(self) -> list[torch.Tensor]:
        """Of one microbatch, the same batch each time."""
        items = [(item, layout) for item, layout in self.program.inputs if item.kind == "argument"]
        mesh = self.program.mesh
        return [_part(item, layout, mesh) if _is_received(item) else self.batch[item.value.name] for item, layout in items]


class _Away(Offload):
    """What waits on the host does not count until it is back."""

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    def _bring(self, copy: Any) -> torch.Tensor:
        return torch.empty(copy.num_bytes, dtype=torch.uint8)


def _is_received(item: Input) -> bool:
    """From another stage, for each microbatch anew."""
    return item.kind == "argument" and item.value.needs_grad


def _part(item: Input, layout: Layout, mesh: Mesh) -> torch.Tensor:
    needs_grad = item.value.needs_grad and item.kind != "buffer"
    return torch.empty(local_shape(item.value.shape, layout, mesh.shape), dtype=item.value.dtype, requires_grad=needs_grad)


@dataclass
class _Step:
    """A step as it goes on: `alive` holds what the backward of each microbatch in flight needs."""

    rank: _Rank
    storages: Storages

    def run(self, actions: Sequence[Action], *, is_split: bool) -> list[tuple[str, int]]:
        """The phases but the update, and their peaks without what is stored."""
        phases: list[tuple[str, int]] = []
        alive: dict[int, list[torch.Tensor]] = {}
        self.storages.restart()
        results = open_step(self.rank) if is_split else {}
        if is_split:
            phases.append(("gather", self.storages.restart()))
        for kind, number in actions:
            if kind == "F":
                alive[number] = _differentiated(self._forward())
            elif kind in ("B", "W"):
                _backward(alive.pop(number))
            phases.append((f"{kind}{number}", self.storages.restart()))
        if is_split:
            close_step(self.rank, results)
            phases.append(("reduce", self.storages.restart()))
        return phases

    def _forward(self) -> tuple[Any, ...]:
        arguments = self.rank.arguments()
        return self.rank.function(self.rank, *arguments)


def _differentiated(outputs: Sequence[Any]) -> list[torch.Tensor]:
    """The loss, which is a scalar; of a stage that has none, all that a gradient comes back for."""
    found = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
    return [x for x in found if not x.shape][:1] or found


def _backward(outputs: list[torch.Tensor]) -> None:
    if outputs:
        torch.autograd.backward(outputs, [torch.empty_like(x) if math.prod(x.shape) != 1 else None for x in outputs])
