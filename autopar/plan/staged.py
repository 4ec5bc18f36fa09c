"""A plan in stages, in microbatches, or both: what each stage is, in which order they run, and what that costs."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.costmodel.cluster import Cluster, cluster_from_json
from autopar.costmodel.compute import op_time, weight_share
from autopar.costmodel.memory import local_bytes
from autopar.costmodel.training import Training
from autopar.costmodel.transfer import transfer
from autopar.errors import MeshError, MicrobatchError, PlanError
from autopar.ir.cut import StageGraph, cut
from autopar.ir.graph import Graph
from autopar.ir.loss_only import loss_only
from autopar.ir.text import fingerprint
from autopar.mesh import Devices, Mesh
from autopar.plan import store
from autopar.plan.plan import Plan
from autopar.plan.schedule import Schedule
from autopar.plan.simulate import StageTimes, simulate
from autopar.plan.staged_text import format_staged
from autopar.plan.store import HandCosts
from autopar.plan.timeline import Timeline
from autopar.sbp.microbatch import Microbatched, microbatched

# The mesh axis along which the stages lie, as torchtitan calls it; it is the outermost.
PIPELINE = "pp"
KIND = "staged"


@dataclass(frozen=True)
class StagedPlan:
    """`stages[s]` is the plan of stage s for one microbatch, on the sub-mesh of a rank of the pipeline; `starts`: first ops of the stages
    but the first. `graph` is that of the whole batch. training: of the whole. hand, found_by, timings, lower_bound_s: as in `Plan`;
    peak_bytes too, of a device of each rank of the pipeline.

    A step takes what the schedule takes, and what the slowest rank does once: gather parameters, reduce gradients, update.
    """

    mesh: Mesh
    cluster: Cluster
    training: Training
    memory_limit_bytes: float
    graph: Graph
    schedule: Schedule
    starts: tuple[str, ...]
    stages: tuple[Plan, ...]
    lower_bound_s: float = 0.0
    found_by: str = ""
    hand: Mapping[str, HandCosts] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: tuple[int, ...] = ()

    @cached_property
    def times(self) -> tuple[StageTimes, ...]:
        """Seconds of each stage on a microbatch."""
        link = transfer(self.cluster, self.schedule.num_ranks, self.stages[0].mesh.num_devices)
        sent = [self._sent_s(stage, link) for stage in range(1, len(self.stages))]
        found = []
        for stage, plan in enumerate(self.stages):
            forward_s, backward_s = (plan.costs.microbatch_s(phase) for phase in ("forward", "backward"))
            weight_s = _weight_s(plan)
            ahead_s, back_s = (sent[at] if 0 <= at < len(sent) else 0.0 for at in (stage, stage - 1))
            found.append(StageTimes(forward_s, backward_s - weight_s, weight_s, ahead_s, back_s))
        return tuple(found)

    def _sent_s(self, stage: int, link: tuple[float, float]) -> float:
        """Seconds that what `stage` receives takes on the way."""
        plan = self.stages[stage - 1]
        sent = {value.name: value for value in plan.graph.outputs}
        layouts = plan.assignment.outputs
        sizes = (local_bytes(x.shape, x.dtype.itemsize, layouts[x.name], plan.mesh.shape) for x in sent.values())
        return link[0] + sum(sizes) / link[1]

    @cached_property
    def timeline(self) -> Timeline:
        """Who computes what, and when, without what is done once."""
        return simulate(self.schedule, self.times)

    @property
    def step_s(self) -> float:
        stages_of = map(self.schedule.stages_of, range(self.schedule.num_ranks))
        ranks = (sum(self.stages[stage].costs.once_s for stage in stages) for stages in stages_of)
        return self.timeline.step_s + max(ranks)

    @property
    def gap(self) -> float:
        """Relative distance of the step time to its bound."""
        return (self.step_s - self.lower_bound_s) / self.step_s if self.step_s > 0 else 0.0

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Of a device of each rank of the pipeline."""
        ranks = range(self.schedule.num_ranks)
        return tuple(sum(self.stages[stage].costs.total_memory_bytes for stage in self.schedule.stages_of(rank)) for rank in ranks)

    def of_other(self, graph: Graph) -> "StagedPlan":
        """The same plan for a graph of the same model with other shapes; MicrobatchError or PlanError if it does not fit."""
        _, cut_graphs = stage_graphs(graph, self.starts, self.schedule.num_microbatches)
        texts = (replace(stage, fingerprint=fingerprint(one.graph)).dumps() for stage, one in zip(self.stages, cut_graphs))
        stages = tuple(Plan.loads(text, one.graph, self.stages[0].mesh) for text, one in zip(texts, cut_graphs))
        return replace(self, graph=graph, stages=stages, lower_bound_s=0.0, peak_bytes=())

    def explain(self) -> str:
        """The plan for people: stages, timeline, memory, and what else there is."""
        return format_staged(self)

    def dumps(self) -> str:
        """JSON text; the graph is not in it, only its fingerprint."""
        content = {
            "format": store.FORMAT,
            "kind": KIND,
            "fingerprint": fingerprint(self.graph),
            "mesh": {"shape": self.mesh.shape, "axis_names": self.mesh.axis_names},
            "cluster": json.loads(self.cluster.to_json()),
            "training": asdict(self.training),
            "memory_limit_bytes": None if self.memory_limit_bytes == float("inf") else self.memory_limit_bytes,
            "schedule": asdict(self.schedule),
            "starts": list(self.starts),
            "lower_bound_s": self.lower_bound_s,
            "found_by": self.found_by,
            "hand": {name: asdict(costs) for name, costs in self.hand.items()},
            "peak_bytes": self.peak_bytes,
            "stages": [json.loads(plan.dumps()) for plan in self.stages],
        }
        return store.signed(content)

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON, whole or not at all."""
        store.write(path, self.dumps())


    @classmethod
    def loads(cls, text: str, graph: Graph, mesh: Mesh | Devices) -> "StagedPlan":
        """The plan that `text` holds, for the model it was made for, on a mesh of the same shape; else PlanError. Trusts nothing in it."""
        content = store.content_of(text)
        try:
            saved = Mesh(tuple(content["mesh"]["shape"]), tuple(content["mesh"]["axis_names"]))
            store.check_belongs(content["fingerprint"], saved, graph, mesh)
            training, schedule = Training(**content["training"]), Schedule(**content["schedule"])
            starts = tuple(map(str, content["starts"]))
            cut_graphs = stage_graphs(graph, starts, schedule.num_microbatches)[1]
            texts = [json.dumps(stage) for stage in content["stages"]]
            limit = content["memory_limit_bytes"]
            return cls(
                mesh=saved,
                cluster=cluster_from_json(json.dumps(content["cluster"])),
                training=training,
                memory_limit_bytes=float("inf") if limit is None else float(limit),
                graph=graph,
                schedule=schedule,
                starts=starts,
                stages=tuple(Plan.loads(stage, one.graph, sub_mesh(saved)) for stage, one in zip(texts, cut_graphs, strict=True)),
                lower_bound_s=float(content["lower_bound_s"]),
                found_by=str(content["found_by"]),
                hand={name: HandCosts(**costs) for name, costs in content["hand"].items()},
                peak_bytes=tuple(map(int, content["peak_bytes"])),
            )
        except KeyError as error:
            raise PlanError(f"the plan lacks {error}; {store.AGAIN}") from error
        except (ValueError, TypeError, AttributeError, MeshError, MicrobatchError) as error:
            raise PlanError(f"the plan cannot be read: {error}; {store.AGAIN}") from error


def loads(text: str, graph: Graph, mesh: Mesh | Devices) -> Plan | StagedPlan:
    """The plan that `text` holds, of either kind."""
    kind = StagedPlan if store.content_of(text).get("kind") == KIND else Plan
    return kind.loads(text, graph, mesh)


def mesh_in(text: str) -> Mesh:
    """The mesh of the plan that `text` holds."""
    saved = store.content_of(text)["mesh"]
    return Mesh(tuple(saved["shape"]), tuple(saved["axis_names"]))


def made_for(text: str) -> tuple[Cluster, dict[str, Any]]:
    """The cluster, and the other wishes, for which the plan that `text` holds was made."""
    content = store.content_of(text)
    limit = content["memory_limit_bytes"]
    training = replace(Training(**content["training"]), num_microbatches=1, num_in_flight=1, num_waiting=0)
    asked = {"training": training, "memory_limit_bytes": float("inf") if limit is None else float(limit)}
    return cluster_from_json(json.dumps(content["cluster"])), asked


def _weight_s(plan: Plan) -> float:
    """Seconds of a microbatch's backward that make gradients of weights."""
    times = ((op, op_time(op, plan.assignment.strategies[op.name], plan.mesh.shape, plan.cluster)[1]) for op in plan.graph.ops)
    return sum(backward_s * weight_share(op) for op, backward_s in times)


def sub_mesh(mesh: Mesh) -> Mesh:
    """The mesh of one rank of the pipeline: `mesh` without its axis "pp"."""
    kept = [(size, name) for size, name in zip(mesh.shape, mesh.axis_names) if name != PIPELINE] or [(1, "dp")]
    return Mesh(tuple(size for size, _ in kept), tuple(name for _, name in kept))


def stage_graphs(graph: Graph, starts: Sequence[str], num_microbatches: int) -> tuple[Microbatched, tuple[StageGraph, ...]]:
    """One microbatch of `graph`, of which training needs the loss only, and its stages; MicrobatchError or ValueError if it cannot be cut
    so."""
    micro = microbatched(loss_only(graph), num_microbatches)
    return micro, cut(micro.graph, starts)
