"""Mixtures of experts in which each rank sorts its own tokens by expert train as one device does."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.handwritten.complete_layouts import bytes_moved, complete
from autopar.planner.layouts.search_meshes import plan_of
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.analysis.expert_routing import routed_signatures
from autopar.sbp.candidates import annotate
from autopar.sbp.signature import EXCHANGES, Candidates, Strategy
from autopar.verify.check_placements import check
from tests.expert_loops import LOOPS, case_of
from tests.grouped_experts import GROUPED, grouped_case
from tests.runtime.any_plan import all_gradients_arrive
from tests.runtime.as_priced import are_as_priced, is_as_priced
from tests.runtime.staged import Sample, compared, one_device, plan_of_sample
from tests.runtime.staged import under as under_stages
from tests.runtime.training import forward_backward, issued, plan_called, planned, traced, under, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import BATCH, HEADS, HIDDEN, SEQUENCE, VOCABULARY, Case

SIZES = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": HEADS}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# How far float32 is from one device, relative to a tensor's largest entry.
TOLERANCE = 2e-4
MORE: Mapping[str, dict[str, Any]] = {
    "Mixtral": {"output_router_logits": True, "router_aux_loss_coef": 0.1},
    "Qwen3Moe": {"output_router_logits": True, "moe_intermediate_size": 16, "head_dim": 8},
    "Olmoe": {},
    "GptOss": {"head_dim": 8, "sliding_window": 4},
    "DeepseekV3": {"num_key_value_heads": HEADS, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, **LATENT},
    "Glm4Moe": {"moe_intermediate_size": 16, "head_dim": 8, "first_k_dense_replace": 1},
}
ALL_TOKENS: Mapping[str, dict[str, Any]] = {  # all experts compute all tokens
    "Llama4": {"intermediate_size_mlp": 48, "head_dim": 8, "interleave_moe_layer_step": 1, "num_experts_per_tok": 1}
}


def built(name: str, num_layers: int) -> Case:
    """A model of transformers, whose grouped products are not for float64, or a loop over experts."""
    import transformers

    if name in LOOPS:
        return case_of(name, num_layers)
    if name in GROUPED:
        return grouped_case(name, num_layers)

    config = {**SIZES, **EXPERTS, "num_key_value_heads": 2, "max_position_embeddings": SEQUENCE, "use_cache": False}
    config |= {"num_hidden_layers": num_layers, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    more = (MORE | ALL_TOKENS)[name]
    kind = getattr(transformers, f"{name}TextConfig" if name in ALL_TOKENS else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(kind(**config | more))
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    labels = torch.where(torch.arange(SEQUENCE) < torch.arange(1, BATCH + 1)[:, None], tokens, -100)
    return Case(model, (), {"input_ids": tokens, "labels": labels}, lambda output: output.loss)


def _local_axes(strategy: Strategy) -> tuple[int, ...]:
    """The axes on which an op has tokens of each rank's own."""
    placed = enumerate(strategy.signatures)
    return tuple(axis for axis, one in placed if "L" in {p.kind for p in one.inputs + one.outputs})


def drawn(graph: Graph, folded: Folded, candidates: Candidates, mesh: Mesh, draw: random.Random) -> Any:
    """Any valid strategy for every op, but one choice of the axes on which tokens are routed locally."""
    routed, axes = routed_signatures(graph), tuple(axis for axis in range(mesh.ndim) if draw.random() < 0.7)
    chosen = {
        name: draw.choice(
            [one for one in offered if _local_axes(one) == (axes if name in routed else ()) and "E(" not in str(one)]
        )
        for name, offered in sorted(candidates.strategies.items())
    }
    strategies = {op.name: chosen[folded.representative[op.name]] for op in graph.ops}
    arguments = {
        item.value.name: draw.choice(candidates.layouts[item.value.name]) for item in graph.of_kind("argument")
    }
    return complete(graph, folded, candidates, strategies, arguments, bytes_moved(mesh))


def plan_of_kind(kind: str, graph: Graph, mesh: Mesh) -> Plan:
    """ "drawn:SEED" (any plan) or a kind of `plan_called`."""
    if not kind.startswith("drawn:"):
        return plan_called(kind, graph, mesh)
    folded = fold(graph)
    assignment = drawn(graph, folded, annotate(graph, mesh, folded), mesh, random.Random(kind))
    return plan_of(graph, assignment, mesh, load_cluster("free-links"))


def train_under(name: str, num_layers: int, plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """On every rank: a step of the model under each plan beside one device."""
    truth, reports = forward_backward(built(name, num_layers)), []
    for kind, plan in plans.items():
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, built(name, num_layers), mesh)
        found = worst(forward_backward(case), truth, 1e-6)
        reports.append({"kind": kind, "found": found, "issued": issued(case, mesh), "planned": Counter(planned(plan))})
        if not kind.startswith("drawn"):  # the checker does not know that a pending sum gives a blank of its shape
            check(case.model._autopar.current().program, mesh)
    return reports


def exchanges(plan: Plan) -> bool:
    """Whether rows are exchanged by expert, of which ranks have different shares."""
    taken = (one for strategy in plan.assignment.strategies.values() for one in strategy.signatures)
    return any(one.role in EXCHANGES for one in taken)


def is_local(plan: Plan) -> bool:
    """Whether a rank sorts its own tokens alone."""
    sorts = [op.name for op in plan.graph.ops if op.target == "aten.sort.default"]
    return bool(sorts) and all(_local_axes(plan.assignment.strategies[name]) for name in sorts)


KINDS = {
    (4,): ("searched", "ddp", "zero2", "zero3", "drawn:0"),
    (2, 2): ("megatron", "megatron:zero3", "drawn:1", "drawn:2"),
}


@pytest.mark.multirank
@pytest.mark.parametrize("shape", KINDS, ids=str)
@pytest.mark.parametrize("name", MORE)
def test_trains_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    num_layers = 5  # of more copies than a hand plan's graph keeps
    graph = traced(built(name, num_layers))
    plans = {kind: plan_of_kind(kind, graph, Mesh(shape, ("dp", "tp")[: len(shape)])) for kind in KINDS[shape]}
    for kind, plan in plans.items():
        assert kind.startswith("drawn") or is_local(plan), kind
        assert "zero3" not in kind or any("experts" in name for name in plan.assignment.regathered), kind
    is_exact = all_gradients_arrive(
        graph
    )  # of Qwen3-MoE and GLM-4 the scores beside those of the chosen experts get none
    for kind, reports in zip(plans, zip(*ranks4.run(train_under, name, num_layers, plans))):
        for report in reports:
            assert report["found"][0] < TOLERANCE, report
            assert exchanges(plans[kind]) or is_as_priced(report["issued"], report["planned"], is_exact=is_exact)
        assert are_as_priced(reports, is_exact=is_exact), reports


@pytest.mark.multirank
@pytest.mark.parametrize("shape", KINDS, ids=str)
@pytest.mark.parametrize("name", ALL_TOKENS)
def test_experts_of_all_tokens_train_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    graph = traced(built(name, 5))
    plans = {kind: plan_of_kind(kind, graph, Mesh(shape, ("dp", "tp")[: len(shape)])) for kind in KINDS[shape]}
    products = [op.name for op in graph.ops if op.target == "aten.bmm.default"]
    for kind, plan in plans.items():
        chosen = {one for name in products for one in plan.assignment.strategies[name].signatures}
        assert "drawn" in kind or any(placed.is_split for one in chosen for placed in one.inputs), kind
    is_exact = all_gradients_arrive(graph)
    for reports in zip(*ranks4.run(train_under, name, 5, plans)):
        for report in reports:
            assert report["found"][0] < TOLERANCE, report
            assert is_as_priced(report["issued"], report["planned"], is_exact=is_exact), report


def train_staged(name: str, num_layers: int, plan: StagedPlan) -> dict[str, Any]:
    """On every rank: two steps in stages and microbatches beside one device."""
    whole, own = (Sample(*built(name, num_layers)[:3], None) for _ in range(2))
    return compared(own, under_stages(plan, own), plan, one_device(whole, 2))


@pytest.mark.multirank
@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "dp=4"])
def test_stages_and_microbatches_train_like_one_device(ranks4: Ranks, mesh: str) -> None:
    plan = plan_of_sample(Sample(*built("GptOss", 5)[:3], None), mesh, 2)
    assert isinstance(plan, StagedPlan) and any(map(is_local, plan.stages))
    reports = ranks4.run(train_staged, "GptOss", 5, plan)
    assert all(max(report["first"], report["last"])[0] < TOLERANCE for report in reports), reports
    assert are_as_priced(reports, is_exact=False), reports
