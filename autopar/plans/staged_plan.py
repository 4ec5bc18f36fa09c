"""`StagedPlan`: a plan with stages, microbatches or both: the plan of each stage, and their schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.costmodel.memory import local_bytes, rank_limits
from autopar.costmodel.roofline import weight_gradients_s
from autopar.costmodel.stage_transfer import RankLink, alone_and_cores, transfers
from autopar.costmodel.training import Training
from autopar.errors import PlanError
from autopar.ir.graph import Graph, Value
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.print_graph import fingerprint
from autopar.ir.split_stages import StageGraph, cut
from autopar.mesh import PIPELINE, Devices, Mesh
from autopar.plans import serialise
from autopar.plans.base_plan import BasePlan
from autopar.plans.json_fields import shown
from autopar.plans.plan import Plan, plan_of
from autopar.plans.serialise import HandCosts, SavedAnyPlan, SavedPlan, SavedStages
from autopar.plans.validate import check_crossing, check_stages
from autopar.sbp.assignment import produced_layouts
from autopar.sbp.microbatch.microbatch_graph import Microbatched, microbatched
from autopar.sbp.placement import I
from autopar.sbp.uneven.uneven_extents import batch_extents
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.timeline import Timeline


@dataclass(frozen=True)
class StagedPlan(BasePlan):
    """A plan in stages, microbatches or both.

    `stages[s]`: the plan of stage s for one microbatch, on the sub-mesh of a rank of the pipeline; `starts`: names of
    the first ops of the stages but the first. `graph`, `training`: of the whole batch. `hand`, `found_by`, `timings`,
    `lower_bound_s`, `bound_of`, `is_from_file`: as in `Plan`; `peak_bytes`: of a device of each rank of the pipeline.
    `memory_limit_bytes`: of any device; those of a group have no more than they can (`rank_limits_bytes`).

    The time of a step is that of the schedule, plus the work of the slowest rank once a step: gathering parameters,
    reducing gradients, updating.
    """

    SAVED = SavedStages

    mesh: Mesh
    cluster: Cluster
    training: Training
    memory_limit_bytes: float
    graph: Graph
    schedule: Schedule
    starts: tuple[str, ...]
    stages: tuple[Plan, ...]
    lower_bound_s: float = 0.0
    bound_of: str = "plan"
    found_by: str = ""
    hand: Mapping[str, HandCosts] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: tuple[int, ...] = ()
    is_from_file: bool = False

    @cached_property
    def times(self) -> tuple[StageTimes, ...]:
        """The times of each stage for a microbatch."""
        links = transfers(self.cluster, self.schedule.num_ranks, self.stages[0].mesh.num_devices)
        sent = [self._sent_s(at, links[self.schedule.rank_of(at)]) for at in range(len(self.stages) - 1)]
        stage_times = []
        for stage, plan in enumerate(self.stages):
            forward_s, backward_s = (plan.costs.microbatch_s(phase) for phase in ("forward", "backward"))
            given = plan.graph, plan.assignment, plan.mesh, plan.cluster
            weight_s = weight_gradients_s(*given, is_split=plan.training.num_waiting > 0)
            ahead_s, back_s = (sent[at] if 0 <= at < len(sent) else 0.0 for at in (stage, stage - 1))
            link, waits_s = links[self.schedule.rank_of(stage)], plan.costs.collective_microbatch_s
            alone, cores = map(float, alone_and_cores(forward_s + backward_s, waits_s, link.speedup, link.cores))
            each_s = forward_s, backward_s - weight_s, weight_s, ahead_s, back_s
            stage_times.append(StageTimes(*each_s, alone, cores))
        return tuple(stage_times)

    def _sent_s(self, stage: int, link: RankLink) -> float:
        """Seconds of the p2p of the boundary tensors that `stage` sends."""
        return link.send_s(sum(self.sent_bytes(stage)))

    def sent_bytes(self, stage: int, *, only_gradients: bool = False) -> list[int]:
        """Bytes of each boundary tensor that a rank of `stage` sends for a microbatch, or of each whose gradient comes
        back.
        """
        plan = self.stages[stage]
        layouts, shape = plan.assignment.outputs, plan.mesh.shape
        sent = [value for value in plan.graph.outputs if value.needs_grad or not only_gradients]
        return [round(local_bytes(x.shape, x.dtype.itemsize, layouts[x.name], shape)) for x in sent]

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of the schedule, without the work once a step."""
        return simulate(self.schedule, self.times)

    @property
    def step_s(self) -> float:
        return self.timeline.step_s + max(sum(rank.values()) for rank in self.once_s)

    @property
    def once_s(self) -> tuple[dict[str, float], ...]:
        """For each rank of the pipeline what its stages do once a step -> seconds."""
        stages_of = map(self.schedule.stages_of, range(self.schedule.num_ranks))
        return tuple(_summed([self.stages[stage].costs.parts_once_s for stage in stages]) for stages in stages_of)

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """The estimate of a device's memory for each rank of the pipeline."""
        ranks = range(self.schedule.num_ranks)
        return tuple(
            sum(self.stages[stage].costs.total_memory_bytes for stage in self.schedule.stages_of(rank))
            for rank in ranks
        )

    @property
    def rank_limits_bytes(self) -> tuple[float, ...]:
        """The memory limit of a device of each rank of the pipeline."""
        return rank_limits(self.memory_limit_bytes, self.cluster, self.schedule.num_ranks)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the whole batch's graph."""
        return fingerprint(self.graph)

    @classmethod
    def of_saved(cls, saved: SavedStages, graph: Graph, mesh: Mesh | Devices, *, is_own: bool) -> "StagedPlan":
        """The plan whose stages have the choices of `saved`; PlanError if they are invalid for this graph and mesh."""
        return serialise.reading(lambda: _of_saved(saved, graph, mesh, is_own=is_own))


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _of_saved(saved: SavedStages, graph: Graph, mesh: Mesh | Devices, *, is_own: bool) -> StagedPlan:
    graph = saved.training.reduced(graph)
    mesh = serialise.check_belongs(saved, graph, mesh)
    _check_ranks(saved.schedule, mesh)
    check_stages(saved)
    cut_graphs = stage_graphs(graph, saved.starts, saved.schedule.num_microbatches)[1]
    parts = zip(saved.stages, cut_graphs)
    stages = tuple(Plan.of_saved(part, one.graph, sub_mesh(mesh), is_own=is_own) for part, one in parts)
    check_crossing(cut_graphs, [part.assignment for part in saved.stages])
    known = {name: item for name, item in vars(saved).items() if name != "fingerprint"}
    plan = StagedPlan(**known | {"mesh": mesh, "graph": graph, "stages": stages, "is_from_file": not is_own})
    return replace(plan, lower_bound_s=min(saved.lower_bound_s, plan.step_s))


def _check_ranks(schedule: Schedule, mesh: Mesh) -> None:
    num_ranks = mesh.shape[0] if mesh.axis_names[0] == PIPELINE else 1
    if PIPELINE in mesh.axis_names[1:] or schedule.num_ranks != num_ranks:
        raise PlanError(
            f"the plan has stages on {schedule.num_ranks} ranks, along an outermost mesh axis {PIPELINE!r}, the mesh is"
            f" {shown(str(mesh))}; name its axes accordingly, or plan for this mesh"
        )


def loads(text: str, graph: Graph, mesh: Mesh | Devices, *, is_own: bool = False) -> Plan | StagedPlan:
    """The plan of either kind in `text`; errors and `is_own` as in `Plan.loads`."""
    if serialise.has_stages(text):
        return StagedPlan.loads(text, graph, mesh, is_own=is_own)
    plan = Plan.loads(text, graph, mesh, is_own=is_own)
    if plan.training != plan.training.of_one_pass:
        raise PlanError(f"the plan has {plan.training} and no schedule that runs microbatches; {serialise.AGAIN}")
    return plan


def _saved(text: str) -> SavedAnyPlan:
    return serialise.loads(SavedStages if serialise.has_stages(text) else SavedPlan, text)


def check_order(text: str) -> str:
    """`text`, of a plan to be run; PlanError if its groups of devices lie in another order than the ranks did."""
    cluster = _saved(text).cluster
    if cluster.groups is not None and cluster.groups.reordered_from:
        raise PlanError(
            f"the plan has the groups of devices in the order {cluster.name}, the ranks are those of"
            f" {cluster.groups.reordered_from}: start the ranks in the plan's order and plan for the cluster with its"
            " groups in that order, or plan for a mesh with axes, which keeps the order of the ranks"
        )
    return text


def mesh_in(text: str) -> Mesh:
    """The mesh of the plan in `text`; PlanError if there is none."""
    return _saved(text).mesh


def param_dtype_in(text: str) -> torch.dtype | None:
    """The dtype in which the plan in `text` computes; None: in the model's own. PlanError if there is none."""
    return _saved(text).training.compute_dtype


def made_for(text: str) -> tuple[Cluster, dict[str, Any]]:
    """(cluster, fields of the `PlanRequest`) for which the plan in `text` was made; PlanError if there is none."""
    saved = _saved(text)
    training = saved.training.of_one_pass
    shares = tuple((saved.mesh.axis_names[axis], rows) for axis, rows in saved.mesh.shares)
    return saved.cluster, {"training": training, "memory_limit_bytes": saved.memory_limit_bytes, "shares": shares}


def sub_mesh(mesh: Mesh) -> Mesh:
    """The mesh of one rank of the pipeline: `mesh` without its axis "pp"."""
    kept = [(size, name) for size, name in zip(mesh.shape, mesh.axis_names) if name != PIPELINE] or [(1, "dp")]
    names = tuple(name for _, name in kept)
    shares = tuple((names.index(mesh.axis_names[axis]), rows) for axis, rows in mesh.shares)
    return Mesh(tuple(size for size, _ in kept), names, shares)


def stage_graphs(
    graph: Graph, starts: Sequence[str], num_microbatches: int
) -> tuple[Microbatched, tuple[StageGraph, ...]]:
    """(the microbatch of `graph` with the loss as only output, its stages).

    MicrobatchError or ValueError if impossible.
    """
    micro = microbatched(graph.once(loss_only), num_microbatches)
    extents = batch_extents(micro.graph)
    stages = cut(micro.graph, starts)
    return micro, tuple(replace(one, graph=replace(one.graph, batch_extents=extents)) for one in stages)


def without_stages(plan: StagedPlan, graph: Graph) -> Plan:
    """A plan of one stage and one microbatch as a `Plan` for the graph with all its outputs."""
    (stage,) = plan.stages
    produced = produced_layouts(graph, replace(stage.assignment, outputs={}))
    names = [value.name for value in graph.outputs if isinstance(value, Value)]
    whole = {name: tuple(placement if placement.kind == "S" else I for placement in produced[name]) for name in names}
    assignment = replace(stage.assignment, outputs=whole | dict(stage.assignment.outputs))
    asked = {"training": plan.training, "memory_limit_bytes": plan.memory_limit_bytes}
    return replace(
        plan_of(graph, assignment, plan.mesh, plan.cluster, **asked),
        lower_bound_s=plan.lower_bound_s,
        bound_of=plan.bound_of,
        found_by=plan.found_by,
        hand=plan.hand,
        timings=plan.timings,
        peak_bytes=plan.peak_bytes,
    )
