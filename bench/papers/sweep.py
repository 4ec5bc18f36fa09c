"""The plan found when the mesh is left open, beside hand plans tuned over every way to write the devices as data times tensor parallel."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.costmodel.cluster import Cluster
from autopar.costmodel.evaluate import evaluate
from autopar.ir.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.skeleton import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Devices, Mesh
from autopar.plan.assemble import make_plan
from autopar.plan.hand import HandPlan, format_hand_plan, hand_plan
from autopar.plan.plan import Plan
from autopar.sbp.annotate import annotate


@dataclass(frozen=True)
class ByHand:
    """The fastest hand plan of one kind, as `name` says; of those that fit in memory if any does."""

    name: str
    step_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Found:
    """`best`: what the search found; `by_hand`: "ddp", "megatron" (with or without sequence parallel) -> the fastest such plan."""

    best: Plan
    by_hand: Mapping[str, ByHand]

    @property
    def expert(self) -> ByHand:
        """The fastest of all hand plans that fit."""
        limit = self.best.memory_limit_bytes
        return min(self.by_hand.values(), key=lambda found: (found.memory_bytes > limit, found.step_s))


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    """The graph of one call."""
    return trace(skeleton(model), args, kwargs)


def compared(graph: Graph, num_devices: int, cluster: Cluster, *, time_limit_s: float) -> Found:
    """The plan found and the tuned hand plans; InfeasibleError if no plan fits."""
    best = make_plan(graph, Devices(num_devices), cluster, time_limit_s=time_limit_s)
    return Found(best, tuned(graph, num_devices, cluster, best.memory_limit_bytes))


def tuned(graph: Graph, num_devices: int, cluster: Cluster, memory_limit_bytes: float) -> dict[str, ByHand]:
    """Data parallelism, and the best Megatron of all degrees with and without sequence parallelism, by the cost of its plan."""
    folded, found = fold(graph), {}
    for kind, plan, mesh in _hand_plans(num_devices):
        one = _evaluated(plan, graph, folded, mesh, cluster)
        found[kind] = min(found.get(kind, one), one, key=lambda x: (x.memory_bytes > memory_limit_bytes, x.step_s))
    return found


def _hand_plans(num_devices: int) -> Iterator[tuple[str, HandPlan, Mesh]]:
    yield "ddp", HandPlan(), Mesh((num_devices,), ("dp",))
    for tensor in range(2, num_devices + 1):
        if num_devices % tensor == 0:
            mesh = Mesh((num_devices // tensor, tensor), ("dp", "tp"))
            for is_sequence_parallel in (False, True):
                yield "megatron", HandPlan((1,), is_sequence_parallel=is_sequence_parallel), mesh


def _evaluated(plan: HandPlan, graph: Graph, folded: Folded, mesh: Mesh, cluster: Cluster) -> ByHand:
    assignment = hand_plan(plan, graph, folded, annotate(graph, mesh, folded), mesh)
    costs = evaluate(graph, assignment, mesh, cluster)
    return ByHand(format_hand_plan(plan, mesh), costs.step_s, costs.total_memory_bytes)


