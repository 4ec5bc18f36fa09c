"""A dry run: a training step of a generated program on tensors without data, action by action of a schedule."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from autopar.codegen.emit import emit
from autopar.codegen.generated_self import Forward, Gather
from autopar.codegen.program import Program
from autopar.costmodel.activations.count_storages import Storages
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.collective_time import nesting
from autopar.ir.graph import Input
from autopar.mesh import Mesh, SeenShares
from autopar.peak_memory.device_kernels import namespace_on
from autopar.runtime.accumulate import OpenStep, open_step
from autopar.runtime.load_program import compile_source
from autopar.runtime.pipeline.split_backward import backward_of_inputs
from autopar.runtime.pipeline.torch_stage import Wire, sendable
from autopar.runtime.saved_tensors.offload_saved import Offload
from autopar.sbp.axis import Axis, joint_axis
from autopar.sbp.nested import Nest
from autopar.sbp.placement import Layout, local_shape
from autopar.schedule.timeline import Action
from autopar.torch_compat import stage_backward


@dataclass
class Rank:
    """The `self` of generated functions (`GeneratedSelf`) in a dry run, with tensors without data.

    `receives`: names of the arguments received from another stage, which are allocated for each microbatch.
    """

    program: Program
    function: Forward
    gather: Gather | None
    axes: tuple[Axis, ...]
    receives: Collection[str]
    state: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    used: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls, program: Program, receives: Collection[str], state: dict[str, torch.Tensor], on: Cluster | str
    ) -> "Rank":
        """The rank of `program` on a device of a cluster, or of a type whose collectives are flat.

        `state`: FQN -> parameter or buffer of the rank's previous stages, which is extended.
        """
        device_type = on if isinstance(on, str) else on.device_type
        names, mesh = namespace_on(device_type) | {"Offload": _Away}, program.mesh
        function = compile_source(emit(program), names)

        def nest(axes: tuple[int, ...]) -> Nest | None:
            how = None if isinstance(on, str) else nesting(on, mesh.shape, axes)
            return None if how is None else Nest(how, (None,) * len(how.sizes))

        named = enumerate(zip(mesh.axis_names, mesh.shape))
        first = {axis: _seen_first(sizes) for axis, sizes in mesh.shares}
        single = [Axis(name, size, 0, None, nest((axis,)), shares=first.get(axis, ())) for axis, (name, size) in named]
        joint = [joint_axis([single[axis] for axis in axes], None, nest(axes)) for axes in program.joint_axes]
        stored = [
            (item, _part(item, layout, mesh)) for item, layout in program.inputs if item.value.name not in receives
        ]
        for item, part in stored:
            if item.kind in ("parameter", "buffer"):
                state.setdefault(item.fqn, part)
        constants, batch = (
            {item.value.name: part for item, part in stored if item.kind == kind} for kind in ("constant", "argument")
        )
        return cls(program, function, names.get("gather"), (*single, *joint), receives, state, constants, batch, {})

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that exist during the whole step."""
        return [*self.state.values(), *self.constants.values(), *self.batch.values()]

    def local(self, fqn: str) -> torch.Tensor:
        return self.state[fqn]

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        return tuple(map(self.local, fqns))

    def local_copy(self, fqn: str) -> torch.Tensor:
        return self.state[fqn].clone()

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        """Does nothing: a write-back allocates no memory."""

    def draw_seed(self) -> int:
        return 0

    @property
    def step_seed(self) -> int:
        return 0

    def received(self) -> dict[str, torch.Tensor]:
        """Receive buffers for one microbatch."""
        inputs, shape = self.program.inputs, self.program.mesh
        return {
            item.value.name: _part(item, layout, shape) for item, layout in inputs if item.value.name in self.receives
        }

    def run(self, received: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """The outputs of one microbatch; all microbatches read the same batch."""
        values = self.batch | dict(received)
        return self.function(
            self, *(values[item.value.name] for item, _ in self.program.inputs if item.kind == "argument")
        )


class _Away(Offload):
    """The scope of offloaded activations in a dry run: they count again from when they are fetched."""

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    def _bring(self, copy: Any) -> torch.Tensor:
        return torch.empty(copy.num_bytes, dtype=torch.uint8, device=copy.device)  # backward leaves the default device


def _seen_first(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shares with those of the rank that is run first: of the one that sees them, or of the largest."""
    if isinstance(sizes, SeenShares):
        return (sizes[sizes.seen], *sizes[: sizes.seen], *sizes[sizes.seen + 1 :])
    return tuple(sorted(sizes, reverse=True))


def _part(item: Input, layout: Layout, mesh: Mesh) -> torch.Tensor:
    needs_grad = item.value.needs_grad and item.kind != "buffer"
    dtype = item.value.stored_dtype or item.value.dtype
    return torch.empty(local_shape(item.value.shape, layout, mesh.shape), dtype=dtype, requires_grad=needs_grad)


Tensors = list[torch.Tensor]


@dataclass
class DryStage:
    """The actions of torch's pipeline stage, and the tensors that it holds between them.

    `sends`: the boundary tensors to the next stage. `arrived`: receive buffers allocated before their action;
    `flying`: microbatch -> (outputs, received tensors);
    `halved`: microbatch -> tensors that wait for "W"; `gathered`: the step, once it is opened.
    """

    rank: Rank
    is_first: bool = True
    sends: tuple[Wire, ...] = ()
    arrived: dict[Action, Any] = field(default_factory=dict)
    flying: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)
    halved: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    gathered: OpenStep | None = None

    def open(self) -> None:
        """Run the part of a step before all microbatches."""
        self.gathered = open_step(self.rank)

    def close(self) -> None:
        """Run the part of a step after all microbatches."""
        gathered, self.gathered = self.gathered, None
        assert gathered is not None, "the step was opened"
        gathered.close()

    def receive(self, action: Action) -> Any:
        """The buffers for the tensors that an action receives from another stage, possibly allocated before."""
        if action in self.arrived:
            return self.arrived.pop(action)
        if action.kind == "F":
            return self.rank.received()
        if self.sends:
            return [torch.empty(wire.shape, dtype=wire.dtype) if wire.needs_grad else None for wire in self.sends]
        outputs = self.flying[action.microbatch][0]
        is_loss = all(x.numel() == 1 for x in outputs)
        return None if is_loss else [torch.empty_like(x) if x.requires_grad else None for x in outputs]

    def forward(self, action: Action) -> Tensors:
        """Run a forward; returns its outputs, which are kept until the backward."""
        received = self.receive(action)
        results = [x for x in self.rank.run(received) if isinstance(x, torch.Tensor)]
        outputs = [sendable(x) for x in results] if self.sends else _differentiated(results)
        self.flying[action.microbatch] = outputs, list(received.values())
        return outputs

    def backward(self, action: Action) -> tuple[Tensors, Tensors]:
        """Run a backward, or its part for the inputs.

        Returns the gradients received and those for the previous stage.
        """
        came = self.receive(action._replace(kind="B"))
        outputs, received = self.flying.pop(action.microbatch)
        gone, left = (), None
        if action.kind == "B":
            gone = _backward(outputs, came, received)
        elif not self.is_first:
            gone, left = backward_of_inputs(outputs, came, received)
            outputs = outputs if left else []
        if action.kind != "B":
            self.halved[action.microbatch] = outputs, came, received, left
        return [x for x in came or () if x is not None], [x.contiguous() for x in gone if x is not None]

    def weights(self, action: Action) -> None:
        """Run the part of a backward for the weights."""
        outputs, came, received, left = self.halved.pop(action.microbatch)
        if left is not None:
            left.run()
        elif self.is_first:
            _backward(outputs, came, received)


@dataclass
class DryStep:
    """A step of one rank, which holds the output of the last forward, as torch's schedules do, and the gradients that
    are being sent back.

    `arrivals`: those of the rank (see `predict._arrivals`); `posted_by`: as in `simulate.posted_by`, of the rank.
    `tied`: FQN of a parameter that other ranks of the pipeline hold too -> their number.
    """

    stages: Mapping[int, DryStage]
    actions: Sequence[Action]
    is_split: bool = True
    arrivals: Mapping[int, Sequence[Action]] = field(default_factory=dict)
    posted_by: Mapping[int, int] = field(default_factory=dict)
    tied: Mapping[str, int] = field(default_factory=dict)

    def run(self, storages: Storages) -> list[tuple[str, np.ndarray]]:
        """(phase, its allocations and frees as `Storages.take_changes` gives them) for all phases but the update."""
        phases: list[tuple[str, np.ndarray]] = []
        storages.restart()
        stages = tuple(self.stages.values())
        if self.is_split:
            for stage in stages:
                stage.open()
            phases.append(("gather", storages.take_changes()))
        self._act(phases, storages)
        if self.is_split:
            for stage in stages:
                stage.close()
            phases.append(("reduce", storages.take_changes()))
        for fqn, num in self.tied.items():
            # The gradients of other ranks and their sum, of which two may exist at a time.
            size = stages[0].rank.state[fqn].untyped_storage().nbytes()
            phases.append((f"tied {fqn}", size * (num + min(num, 2)) * np.array([1, -1])))
        return phases

    def _act(self, phases: list[tuple[str, np.ndarray]], storages: Storages) -> None:
        back: dict[int, list[Tensors]] = {}
        last: Tensors = []
        for index, action in enumerate(self.actions):
            back.pop(index, None)
            for arrival in self.arrivals.get(index, ()):
                here = self.stages[arrival.stage]
                here.arrived[arrival] = here.receive(arrival)
            stage = self.stages[action.stage]
            if action.kind == "F":
                last = stage.forward(action)
            elif action.kind == "W":
                stage.weights(action)
            else:
                back.setdefault(self.posted_by.get(index, -1), []).append(stage.backward(action)[1])
            phases.append((str(action), storages.take_changes()))
        del last, back


def _backward(outputs: Tensors, came: Sequence[Any] | None, received: Tensors) -> Sequence[Any]:
    if not any(x.requires_grad for x in outputs):
        return ()  # the stage trains nothing
    return stage_backward(outputs, came or [None] * len(outputs), received)


def _differentiated(outputs: Tensors) -> Tensors:
    """The outputs that backward starts from: the loss, a scalar, or all
    outputs with a gradient of a stage without one.
    """
    differentiated = [x for x in outputs if x.requires_grad]
    return [x for x in differentiated if not x.shape][:1] or differentiated
