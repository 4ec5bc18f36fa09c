"""What an expert's plans cost beside the plan found: the tuned ones, and the one that a transformers model brings along."""

from dataclasses import dataclass

from torch import nn

from autopar.costmodel.evaluate import evaluate
from autopar.errors import PlanError
from autopar.ir.fold import fold
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.plan.hand import hand_plan, parse_hand_plan
from autopar.plan.hf import hf_styles
from autopar.plan.plan import Plan
from autopar.plan.tuned import tuned
from autopar.sbp.annotate import annotate

_NODE = 8


@dataclass(frozen=True)
class ByHand:
    """A plan's name and its step; both None if there is no such plan that fits the devices."""

    name: str | None
    step_s: float | None


_NOTHING = ByHand(None, None)


def best_by_hand(graph: Graph, mesh: Mesh | Devices, plan: Plan) -> ByHand:
    """The fastest of all grids and flavours."""
    found = tuned(graph, fold(graph), mesh, plan.cluster, memory_limit_bytes=plan.memory_limit_bytes, training=plan.training).best
    return _NOTHING if found is None else ByHand(found.name, found.costs.step_s)


def model_own(model: nn.Module, graph: Graph, plan: Plan) -> ByHand:
    """The model's own plan with tensor parallelism inside nodes of 8, data parallel or ZeRO-3 between them."""
    try:
        styles = hf_styles(model)
    except PlanError:
        return _NOTHING
    num_devices = plan.mesh.num_devices
    mesh = Mesh((num_devices // _NODE, _NODE), ("dp", "tp")) if num_devices > _NODE else Mesh((num_devices,), ("tp",))
    folded = fold(graph)
    candidates = annotate(graph, mesh, folded)
    found = []
    for name in ("hf", "hf:zero3") if mesh.ndim > 1 else ("hf",):
        assignment = hand_plan(parse_hand_plan(name, mesh), graph, folded, candidates, mesh, styles)
        costs = evaluate(graph, assignment, mesh, plan.cluster, training=plan.training)
        if costs.total_memory_bytes <= plan.memory_limit_bytes:
            found.append(ByHand(name, costs.step_s))
    return min(found, key=lambda one: one.step_s, default=_NOTHING)
