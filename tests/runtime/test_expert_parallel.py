"""Mixtures of experts whose rows are exchanged by expert train as one device does."""

from random import Random
from typing import Any

import pytest
import torch

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.handwritten.complete_layouts import bytes_moved, complete
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.planner.layouts.search_meshes import plan_of
from autopar.plans.plan import Plan
from autopar.sbp.analysis.expert_routing import routed_signatures
from autopar.sbp.candidates import annotate
from tests.runtime.any_plan import all_gradients_arrive
from tests.runtime.as_priced import are_as_priced
from tests.runtime.test_local_routing import MORE, TOLERANCE, built, plan_called, train_under
from tests.runtime.training import forward_backward, issued, traced, under, worst
from tests.sbp.exercise import in_order
from tests.workers import Ranks, device_mesh
from tests.zoo import Case

KINDS = {(4,): ("megatron:ep=4,zero2",), (2, 2): ("megatron:ep=2,zero3", "megatron:dp=2,tp=2,ep=2", "drawn:ep=4")}


def drawn(graph: Graph, like: str, mesh: Mesh) -> Plan:
    """Any strategies and layouts, but those of a hand plan where tokens are sorted by expert."""
    folded, draw = fold(graph), Random(like)
    candidates, routed = annotate(graph, mesh, folded), routed_signatures(graph)
    by_hand = hand_plan(parse_hand_plan(f"megatron:{like}", mesh), graph, folded, candidates, mesh)
    chosen = {
        name: by_hand.strategies[name] if name in routed else offered[draw.choice(in_order(offered))]
        for name, offered in sorted(candidates.strategies.items())
    }
    arguments = {
        item.value.name: draw.choice(candidates.layouts[item.value.name]) for item in graph.of_kind("argument")
    }
    strategies = {op.name: chosen[folded.representative[op.name]] for op in graph.ops}
    found = complete(graph, folded, candidates, strategies, arguments, bytes_moved(mesh))
    return plan_of(graph, found, mesh, load_cluster("free-links"))


@pytest.mark.multirank
@pytest.mark.parametrize("shape", KINDS, ids=str)
@pytest.mark.parametrize("name", MORE)
def test_trains_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    """And moves the bytes that were priced, over all ranks together, whatever the experts' shares are."""
    num_layers, mesh = 5, Mesh(shape, ("dp", "tp")[: len(shape)])  # of more copies than a hand plan's graph keeps
    graph = traced(built(name, num_layers))
    plans = {
        kind: drawn(graph, kind.removeprefix("drawn:"), mesh) if "drawn" in kind else plan_called(kind, graph, mesh)
        for kind in KINDS[shape]
    }
    for kind, plan in plans.items():
        assert "zero3" not in kind or any("experts" in name for name in plan.assignment.regathered), kind
    plans = {kind: Plan.loads(plan.dumps(), graph, mesh) for kind, plan in plans.items()}
    is_exact = all_gradients_arrive(
        graph
    )  # of Qwen3-MoE and GLM-4 the scores beside those of the chosen experts get none
    for reports in zip(*ranks4.run(train_under, name, num_layers, plans)):
        assert all(report["found"][0] < TOLERANCE for report in reports), reports
        assert any(one.kind == "all_to_all" for one in reports[0]["issued"])
        assert are_as_priced(reports, is_exact=is_exact), reports


@pytest.mark.multirank
def test_trains_like_one_device_on_eight_ranks(ranks8: Ranks) -> None:
    graph, kind = traced(built("Mixtral", 4)), "megatron:tp=2,ep=4"
    plans = {kind: plan_called(kind, graph, Mesh((4, 2), ("dp", "tp")))}
    is_exact = all_gradients_arrive(graph)
    for reports in zip(*ranks8.run(train_under, "Mixtral", 4, plans)):
        assert all(report["found"][0] < TOLERANCE for report in reports), reports
        assert any(one.kind == "all_to_all" for one in reports[0]["issued"])
        assert are_as_priced(reports, is_exact=is_exact), reports


def one_sided(num_chosen: int) -> Case:
    """A model whose router sends every token to the first experts."""
    case = built("GptOss", 2)
    for layer in case.model.model.layers:
        layer.mlp.router.top_k = num_chosen
        with torch.no_grad():
            layer.mlp.router.bias.copy_(torch.tensor([100.0, 99.0, 0.0, 0.0]))
    return case


def train_one_sided(num_chosen: int, plan: Plan) -> dict[str, Any]:
    """On every rank: a step beside one device."""
    truth, mesh = forward_backward(one_sided(num_chosen)), device_mesh(plan.mesh.shape, plan.mesh.axis_names)
    case = under(plan, one_sided(num_chosen), mesh)
    return {"found": worst(forward_backward(case), truth, 1e-6), "issued": issued(case, mesh)}


@pytest.mark.multirank
@pytest.mark.parametrize("num_chosen", [1, 2])
def test_ranks_whose_experts_have_no_rows_train_like_one_device(ranks4: Ranks, num_chosen: int) -> None:
    """One rank, or two of four, have all rows."""
    plan = plan_called("megatron:ep=4,zero2", traced(one_sided(num_chosen)), Mesh((4,), ("dp",)))
    for report in ranks4.run(train_one_sided, num_chosen, plan):
        assert report["found"][0] < TOLERANCE, report
        assert any(one.kind == "all_to_all" for one in report["issued"])


def three_rows() -> Case:
    """A model and a batch that four ranks do not divide, but its tokens."""
    case = built("Mixtral", 2)
    return case._replace(kwargs={name: x[:3] for name, x in case.kwargs.items()})


def train_three_rows(plan: Plan) -> dict[str, Any]:
    """On every rank: a step beside one device."""
    truth, mesh = forward_backward(three_rows()), device_mesh(plan.mesh.shape, plan.mesh.axis_names)
    case = under(plan, three_rows(), mesh)
    return {"found": worst(forward_backward(case), truth, 1e-6), "issued": issued(case, mesh)}


@pytest.mark.multirank
def test_tokens_of_a_batch_that_ranks_do_not_divide_are_exchanged(ranks4: Ranks) -> None:
    plan = plan_called("megatron:ep=4,zero2", traced(three_rows()), Mesh((4,), ("dp",)))
    for report in ranks4.run(train_three_rows, plan):
        assert report["found"][0] < TOLERANCE, report
        assert any(one.kind == "all_to_all" for one in report["issued"])
