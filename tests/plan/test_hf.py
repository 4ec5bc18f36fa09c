"""The plans that transformers models bring along."""

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from autopar.errors import PlanError
from autopar.ir.fold import fold
from autopar.ir.skeleton import skeleton
from autopar.ir.trace import trace
from autopar.plan.check import check_assignment
from autopar.plan.hand import hand_plan, parse_hand_plan
from autopar.plan.hf import hf_styles
from autopar.plan.plan import plan_of
from autopar.sbp.annotate import annotate
from autopar.sbp.assignment import Assignment
from tests.codegen.training import train_under
from tests.plan.cases import CPU, MESH, annotated, by_hand, folded, tally, traced
from tests.workers import Ranks
from tests.zoo import HEADS, HIDDEN, LAYERS, SEQUENCE, VOCABULARY, build


def hf_plan(name: str, kind: str = "hf") -> Assignment:
    styles = hf_styles(build(name).model)
    return hand_plan(parse_hand_plan(kind, MESH), traced(name), folded(name), annotated(name), MESH, styles)


def test_llama_is_split_as_megatron_splits_it():
    assert hf_plan("llama").layouts == by_hand("llama", "megatron").layouts
    assert hf_plan("llama", "hf:dp=2,tp=2,zero3").layouts == by_hand("llama", "megatron:zero3").layouts


def test_llama_gathers_its_logits():
    """Megatron's collectives but for the head: "colwise_gather_output" instead of a loss over the split vocabulary."""
    found, megatron = (tally("llama", plan) for plan in (hf_plan("llama"), by_hand("llama", "megatron")))
    assert found["forward", "all_gather", "tp"] == 1
    assert found["forward", "all_reduce", "tp"] == 2 * LAYERS + 1 == megatron["forward", "all_reduce", "tp"] - 2
    assert found["backward", "all_reduce", "tp"] == megatron["backward", "all_reduce", "tp"]


def test_norms_inside_attention_follow():
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "head_dim": 8, "max_position_embeddings": SEQUENCE}
    config = Qwen3Config(
        vocab_size=VOCABULARY, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2, use_cache=False, **sizes
    )
    model, tokens = Qwen3ForCausalLM(config), torch.zeros(8, SEQUENCE, dtype=torch.long)
    graph = trace(skeleton(model), (), {"input_ids": tokens, "labels": tokens.clone()})
    folded = fold(graph)
    candidates = annotate(graph, MESH, folded)
    found = hand_plan(parse_hand_plan("hf", MESH), graph, folded, candidates, MESH, hf_styles(model))
    check_assignment(found, graph, folded, candidates, MESH)
    assert found == hand_plan(parse_hand_plan("hf", MESH), graph, folded, candidates, MESH, hf_styles(model))
    heads = [op for op in graph.ops if "sdpa" in op.target or "scaled_dot_product_attention" in op.target]
    assert heads and all(str(found.strategies[op.name].output_layout(0)[1]) == "S(1)" for op in heads)


@pytest.mark.parametrize("name", ["gpt2", "bert", "mlp"])
def test_models_without_a_plan_say_so(name):
    with pytest.raises(PlanError, match=r"no tensor-parallel plan.*megatron"):
        hf_styles(build(name).model)


def test_styles_without_a_like_are_named():
    model = nn.Linear(2, 2)
    model._tp_plan = {"experts": "moe_tp_experts"}
    with pytest.raises(PlanError, match=r"experts has style 'moe_tp_experts', expected one of .*colwise"):
        hf_styles(model)


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(PlanError, match=r"none of elsewhere is a module"):
        hand_plan(parse_hand_plan("hf", MESH), traced("mlp"), folded("mlp"), annotated("mlp"), MESH, {"elsewhere": "colwise"})
    with pytest.raises(PlanError, match=r"needs the styles"):
        hand_plan(parse_hand_plan("hf", MESH), traced("mlp"), folded("mlp"), annotated("mlp"), MESH)


@pytest.mark.multirank
def test_llama_trains_as_on_one_device(ranks4: Ranks):
    plan = plan_of(traced("llama"), hf_plan("llama"), MESH, CPU)
    for of_rank in ranks4.run(train_under, "llama", {"hf": plan}, timeout_s=240):
        assert of_rank[0]["first"][0] < 1e-5 and of_rank[0]["last"][0] < 1e-5
        assert of_rank[0]["issued"] == of_rank[0]["predicted"]
