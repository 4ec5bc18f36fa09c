"""`named_plan`: the plan of a graph that a hand plan's text describes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from autopar.costmodel.cluster.device_groups import seen_by
from autopar.costmodel.cluster.hardware import Cluster
from autopar.ir.folding.fold import fold
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.handwritten.hand_plan import NO_STYLES, hand_plan, parse_hand_plan
from autopar.planner.handwritten.hf_tp_plan import hf_styles
from autopar.planner.problem import Setting
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of


def named_plan(text: str, model: nn.Module, graph: Graph, mesh: Mesh, cluster: Cluster, request: PlanRequest) -> Plan:
    """The hand plan `text` of `model`, traced as `graph`, with the buckets of parameters that are fastest for it, as it
    is priced beside plans that are searched. PlanError if `text` is none on this mesh.
    """
    return next(named_plans((text,), model, graph, mesh, cluster, request))


def named_plans(
    texts: Iterable[str], model: nn.Module, graph: Graph, mesh: Mesh, cluster: Cluster, request: PlanRequest
) -> Iterator[Plan]:
    """The hand plan of each text, with the first and last copies of a block in buckets of their own, as a search has
    them that compares its plan with hand plans. On groups of devices all have equal parts, and the slowest is priced.
    """
    plans, request = {text: parse_hand_plan(text, mesh) for text in texts}, request.on_least(cluster)
    if not plans:
        return
    graph = request.training.reduced(graph)
    folded = fold(graph)
    apart = segmented(folded, graph, ends_apart(folded))
    priced_on = cluster if cluster.groups is None else seen_by(cluster, max(0, cluster.groups.seen))
    problem = Setting(graph, mesh, priced_on, request, Budget.of()).problem(apart)
    for text, plan in plans.items():
        styles = hf_styles(model) if plan.is_hf else NO_STYLES
        assignment = hand_plan(plan, graph, problem.folded, problem.everything, mesh, styles=styles)
        choice = problem.encode(assignment)
        by_hand = plan_of(
            graph,
            assignment if choice is None else problem.decode(choice),
            mesh,
            cluster,
            training=request.training,
            memory_limit_bytes=request.limit_bytes,
        )
        yield replace(by_hand, found_by=f"hand plan {text}")
