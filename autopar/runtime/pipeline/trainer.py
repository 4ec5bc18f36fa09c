"""`Trainer`: training steps of a plan in stages and microbatches, on this rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.codegen.lower import lower
from autopar.errors import AutoparError
from autopar.ir.autocast import autocast_off
from autopar.ir.call_args import call
from autopar.ir.export.placeholders import flat_arguments
from autopar.ir.graph import Graph, Input, Value
from autopar.ir.interpret import run_constants
from autopar.ir.op_facts import is_random
from autopar.mesh import PIPELINE, mesh_of
from autopar.plans.resplit import resplit_stages
from autopar.plans.staged_plan import StagedPlan, stage_graphs
from autopar.runtime.accumulate import open_step
from autopar.runtime.dtensor_state import as_dtensor
from autopar.runtime.load_program import Loaded, axes_of, load
from autopar.runtime.pipeline.fail_together import Meeting, failing_together
from autopar.runtime.pipeline.held_tensors import holders, trained
from autopar.runtime.pipeline.lanes import make_lanes
from autopar.runtime.pipeline.run_schedule import StageRunner
from autopar.runtime.pipeline.stage_gradient import mark_gradients
from autopar.runtime.pipeline.torch_stage import LocalStage, Wire, Work
from autopar.runtime.process_groups import first_group, with_axis_of_one
from autopar.runtime.rank_agreement import peers_alive
from autopar.runtime.run_program import on_device
from autopar.runtime.seeded_rng import draw_seed
from autopar.sbp.axis import Axis
from autopar.sbp.convert import move
from autopar.sbp.in_flight import timed
from autopar.sbp.microbatch.microbatch_graph import Microbatched
from autopar.sbp.placement import I, Layout
from autopar.sbp.uneven.dim_parts import DimParts


def pipeline_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh, dist.ProcessGroup | None, int]:
    """(mesh of this rank's stages, group of the ranks along the pipeline, this rank's index in it).

    Without a pipeline the group is None and the index 0.
    """
    names = mesh.mesh_dim_names or ()
    if PIPELINE not in names:
        return mesh, None, 0
    rest = tuple(name for name in names if name != PIPELINE)
    if not rest:  # the mesh of a stage has at least one axis
        mesh = with_axis_of_one(mesh, "dp")
        rest = ("dp",)
    return mesh[rest], first_group(mesh.get_group(PIPELINE)), mesh.get_local_rank(PIPELINE)


@dataclass(frozen=True, eq=False)
class Pass:
    """The `self` of generated functions (`GeneratedSelf`) in one microbatch: `loaded` with other constants and seeds.

    `seed`: of this microbatch's random ops; `step_seed`: of those that draw the same numbers in all microbatches.
    """

    loaded: Loaded
    constants: Mapping[str, torch.Tensor]
    seed: int
    step_seed: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.loaded.axes

    @property
    def used(self) -> Mapping[str, torch.Tensor]:
        return self.loaded.used

    def draw_seed(self) -> int:
        return self.seed

    def local(self, fqn: str) -> torch.Tensor:
        return self.loaded.local(fqn)

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        return self.loaded.locals_together(*fqns)

    def local_copy(self, fqn: str) -> torch.Tensor:
        return self.loaded.local_copy(fqn)

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        self.loaded.write_back(fqn, value)


@dataclass(frozen=True, eq=False)
class LoadedStage:
    """A stage of this rank: its number, its loaded program, and the names of received values and arguments it reads."""

    number: int
    loaded: Loaded
    receives: tuple[str, ...]
    arguments: tuple[tuple[Input, Layout], ...]


@dataclass(frozen=True, eq=False)
class Trainer:
    """The stages of this rank, and the training steps of a plan on them.

    `planned`: the plan, in the shares in which the batch was planned. `graph`: of the whole batch. `draws`: whether it
    has random ops, so that each step takes a seed. `tied`: FQN of each parameter that several ranks of the pipeline
    hold -> those ranks. `meeting`: of the ranks of the whole mesh.
    """

    planned: StagedPlan
    graph: Graph
    micro: Microbatched
    parts: tuple[LoadedStage, ...]
    runner: StageRunner
    group: dist.ProcessGroup | None
    tied: Mapping[str, tuple[int, ...]]
    meeting: Meeting
    draws: bool

    @property
    def plan(self) -> StagedPlan:
        """The plan, which is priced anew if the batch is in other shares since."""
        return resplit_stages(self.planned, self.parts[0].loaded.shares)

    def share(self, sizes: tuple[int, ...]) -> None:
        """From the next step on the batch is in shares of these sizes."""
        for part in self.parts:
            part.loaded.share(sizes)
        self.runner.take([_local_stage(part.number, part.receives, part.loaded) for part in self.parts])

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """FQNs of this rank's tied parameters that an earlier rank of the pipeline holds too."""
        here = 0 if self.group is None else dist.get_rank(self.group)
        return frozenset(fqn for fqn, ranks in self.tied.items() if here > ranks[0])

    @property
    def source(self) -> str:
        """The generated Python of this rank's stages."""
        return "\n".join(f"# stage {part.number}\n{part.loaded.source}" for part in self.parts)

    def of(self, owners: Mapping[str, tuple[nn.Module, str]]) -> "Trainer":
        """The trainer for a copy of the module, whose tensors have these `owners`."""
        return replace(self, parts=tuple(replace(part, loaded=part.loaded.of(owners)) for part in self.parts))

    def step(self, args: tuple, kwargs: dict, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Run forward and backward of the whole batch, add its gradients to those of the parameters, return the loss.

        Under torch.no_grad, forward alone. Backward is that of `scale` times the loss, if it is given.
        """
        if scale is not None:
            self._check_one_dtype()
        leaves = flat_arguments(self.graph.argument_spec, args, kwargs)
        seed = draw_seed() if self.draws else 0  # of other models the random state stays, as on one device
        with failing_together(self.meeting), autocast_off(self.runner.device.type):
            given = self._given(leaves)
            count = self.planned.schedule.num_microbatches if torch.is_grad_enabled() else 0
            opened = [open_step(part.loaded, count) for part in self.parts]
            works = {part.number: self._work(part, given, seed) for part in self.parts}
            if not torch.is_grad_enabled():
                loss = self.runner.forward(works)
                for part in self.parts:
                    part.loaded.used.clear()
                return loss
            result = self.runner.step(works, scale=scale)
            before = self._set_aside()
            for each in opened:
                each.close()
            self._sum_tied(before)
        if self.group is not None:
            own = ((part.loaded, item.fqn) for part in self.parts for item in trained(part.loaded.graph))
            parameters = (*(loaded.state(fqn) for loaded, fqn in own), *self._tied_here().values())
            mark_gradients(parameters, is_scaled=scale is not None)
        return result.loss

    def _check_one_dtype(self) -> None:
        """AutoparError if gradients are of several dtypes, of which GradScaler looks at one after the other: a rank
        that has none of one would not take part in the ranks' exchange.
        """
        stages = self.planned.stages if self.group is not None else ()
        dtypes = {item.value.stored_dtype or item.value.dtype for stage in stages for item in trained(stage.graph)}
        if len(dtypes) > 1:
            raise AutoparError(
                f"the parameters that are trained are of several dtypes ({', '.join(sorted(map(str, dtypes)))}), of"
                " which a stage may have one only, and GradScaler asks for infinite gradients of each dtype apart: have"
                " them in one dtype, or compile for a mesh without a pipeline axis"
            )

    def _given(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Name of each argument of the graph -> its whole tensor, token counts of the loss included."""
        device_type = self.parts[0].loaded.mesh.device_type
        fqns = {item.value.name: item.fqn for item in self.graph.of_kind("argument")}
        given = {
            name: on_device(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, fqns[name], device_type)
            for name, leaf in zip(self.graph.arguments, leaves)
            if isinstance(name, str) and isinstance(leaf, torch.Tensor)  # a constant may be a text too
        }
        counts = (count for count in self.micro.counts if self._reads(count.input))
        return given | {count.input.value.name: self._counted(count.graph, given) for count in counts}

    def _reads(self, item: Input) -> bool:
        return any(item.value.name == own.value.name for part in self.parts for own, _ in part.arguments)

    def _counted(self, graph: Graph, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The value of a token count, which depends on the whole batch."""
        values = dict(given) | run_constants(graph, next(iter(given.values())).device)
        values |= {item.value.name: self._buffer(item.fqn) for item in graph.of_kind("buffer")}
        with torch.no_grad():
            for op in graph.ops:
                values.update(
                    (value.name, x) for value, x in zip(op.outputs, call(op, [values[v.name] for v in op.inputs]))
                )
        return values[graph.outputs[0].name]

    def _buffer(self, fqn: str) -> torch.Tensor:
        part = next(part for part in self.parts if fqn in part.loaded.owners)
        return part.loaded.state(fqn).full_tensor()

    def _work(self, part: LoadedStage, given: Mapping[str, torch.Tensor], seed: int) -> Work:
        def body(number: int, received: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            values = dict(zip(part.receives, received))
            for item, layout in part.arguments:
                name = item.value.name
                values[name] = _cut(self._slice(given[name], name, number), layout, part.loaded.axes)
            constants = {name: self._slice(x, name, number) for name, x in part.loaded.constants.items()}
            inputs = [values[item.value.name] for item, _ in part.loaded.program.inputs if item.kind == "argument"]
            return part.loaded.function(
                Pass(part.loaded, constants, _mixed(seed, part.number, number), _mixed(seed, part.number)), *inputs
            )

        return body

    def _slice(self, x: torch.Tensor, name: str, number: int) -> torch.Tensor:
        """The slice of a whole tensor for microbatch `number`."""
        placement = self.micro.placements.get(name)
        if placement is None or not placement.is_split:
            return x
        parts = DimParts(placement.dim, sections=placement.sections)
        return parts.of_whole(x, number, self.micro.num_microbatches)

    def _tied_here(self) -> dict[str, DTensor]:
        here = 0 if self.group is None else dist.get_rank(self.group)
        states = {fqn: part.loaded.state for part in self.parts for fqn in self.tied if fqn in part.loaded.owners}
        return {fqn: states[fqn](fqn) for fqn, ranks in sorted(self.tied.items()) if here in ranks}

    def _set_aside(self) -> dict[str, torch.Tensor | None]:
        """Take away and return the gradients of tied parameters from
        earlier steps, which are summed over ranks already.
        """
        gradients = {fqn: parameter.grad for fqn, parameter in self._tied_here().items()}
        for parameter in self._tied_here().values():
            parameter.grad = None
        return gradients

    def _sum_tied(self, before: Mapping[str, torch.Tensor | None]) -> None:
        """Sum the gradients of tied parameters over all ranks that hold
        them, in rank order, and add those from before.
        """
        for fqn, parameter in self._tied_here().items():
            assert self.group is not None, "a tied parameter is held by several ranks of the pipeline"
            gradient = _add_others(parameter, self.tied[fqn], self.group, self.planned.training.sum_dtype)
            if (earlier := before[fqn]) is not None:
                parameter.grad = earlier.add_(gradient)


def _mixed(*numbers: int) -> int:
    """A seed that depends on all `numbers`, the same on every rank."""
    return hash(numbers) & (2**62 - 1)


def _add_others(
    parameter: DTensor, ranks: Sequence[int], group: dist.ProcessGroup, dtype: torch.dtype | None
) -> torch.Tensor:
    """The gradient, after those of the other ranks were added in `dtype`, by default its own."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    own = as_dtensor(parameter.grad).to_local().contiguous()
    here = dist.get_rank(group)
    parts = [own if rank == here else torch.empty_like(own) for rank in ranks]
    # together: NCCL ends a send only when its receive has begun, and every rank would send first
    others = [rank for rank in ranks if rank != here]
    sends = [dist.P2POp(dist.isend, own, group=group, group_peer=rank) for rank in others]
    receives = [
        dist.P2POp(dist.irecv, part, group=group, group_peer=rank) for part, rank in zip(parts, ranks) if rank != here
    ]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        timed(work.wait)
    total = parts[0].to(dtype or own.dtype)
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    as_dtensor(parameter.grad).to_local().copy_(total)
    return parameter.grad


def _cut(x: torch.Tensor, layout: Layout, axes: Sequence[Any]) -> torch.Tensor:
    for axis, placement in zip(axes, layout):
        x = move(x, axis, I, placement)
    return x


def make_trainer(
    plan: StagedPlan,
    graph: Graph,
    mesh: DeviceMesh,
    owners: Mapping[str, tuple[nn.Module, str]],
    place: str,
    sizes: tuple[int, ...] = (),
) -> Trainer:
    """The trainer of this rank with its stages loaded; all ranks of the mesh call this.

    `place`: the prefix of its keys in the store, unique to it. `sizes`: of the shares of the batch, if they were
    changed since it was planned.
    """
    own_mesh, group, rank = pipeline_mesh(mesh)
    micro, stages = stage_graphs(graph, plan.starts, plan.schedule.num_microbatches)
    parts, local = [], []
    for number in plan.schedule.stages_of(rank):
        stage, part = stages[number], plan.stages[number]
        how = {"alike": micro.alike, "is_halved": plan.schedule.is_halved}
        placed = replace(mesh_of(own_mesh), shares=part.mesh.shares)
        program = lower(part.graph, placed, part.assignment, is_split=True, **how)
        with peers_alive():
            shares = tuple((axis, sizes or rows) for axis, rows in placed.shares)
            axes = axes_of(own_mesh, program.joint_axes, plan.cluster, shares)
        constants = run_constants(part.graph, torch.device(mesh.device_type))
        loaded = load(
            program, choices=part, graph=part.graph, mesh=own_mesh, axes=axes, constants=constants, owners=owners
        )
        given = ((item, layout) for item, layout in program.inputs if item.kind == "argument")
        arguments = tuple((item, layout) for item, layout in given if item.value.name not in stage.receives)
        parts.append(LoadedStage(number, loaded, stage.receives, arguments))
        local.append(_local_stage(number, stage.receives, loaded))
    loss = next(value for value in plan.stages[-1].graph.outputs if isinstance(value, Value))
    lanes = None if group is None else make_lanes(mesh, plan.schedule)
    runner = StageRunner(plan.schedule, local, lanes, torch.device(mesh.device_type), loss.dtype)
    meeting = Meeting(place, mesh.mesh.flatten().tolist())
    draws = any(is_random(op) for op in graph.ops)
    tied = {fqn: ranks for fqn, ranks in holders(plan).items() if len(ranks) > 1}
    return Trainer(plan, graph, micro, tuple(parts), runner, group, tied, meeting, draws)


def _local_stage(number: int, receives: Sequence[str], loaded: Loaded) -> LocalStage:
    by_name = {item.value.name: (item.value, layout) for item, layout in loaded.program.inputs}
    received = tuple(_wire(*by_name[name], loaded) for name in receives)
    outputs = zip(loaded.graph.outputs, loaded.program.outputs)
    return LocalStage(number, received, tuple(_wire(value, layout, loaded) for value, (_, layout) in outputs))


def _wire(value: Value, layout: Layout, loaded: Loaded) -> Wire:
    shape = list(value.shape)
    for axis, placement in zip(loaded.axes, layout):
        if placement.is_split:
            shape[placement.dim] = axis.part_in(placement, shape[placement.dim])
    return Wire(tuple(shape), value.dtype, value.needs_grad)
