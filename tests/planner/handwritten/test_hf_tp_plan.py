"""The plans that transformers models bring along."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3Config

from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.planner.handwritten.hf_tp_plan import hf_styles
from autopar.plans.plan import plan_of
from autopar.plans.validate import check_assignment
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import S, format_layout
from tests.planner.cases import CPU, MESH, annotated, by_hand, folded, tally, traced
from tests.runtime.training import train_under
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


def hf_of(config: PreTrainedConfig) -> tuple[Graph, Assignment, Assignment]:
    """The model's own plan beside Megatron's, both checked."""
    model, tokens = AutoModelForCausalLM.from_config(config), torch.zeros(8, SEQUENCE, dtype=torch.long)
    graph = trace(skeleton(model.train()), (), {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False})
    folded = fold(graph)
    candidates = annotate(graph, MESH, folded)
    plans = [
        hand_plan(parse_hand_plan(kind, MESH), graph, folded, candidates, MESH, hf_styles(model))
        for kind in ("hf", "megatron")
    ]
    for plan in plans:
        check_assignment(plan, graph, folded, candidates, MESH)
    return graph, *plans


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": SEQUENCE,
}
HEADS_EACH = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2}


def test_norms_inside_attention_follow():
    graph, found, megatron = hf_of(Qwen3Config(**SIZES, **HEADS_EACH, head_dim=8))
    assert found.layouts == megatron.layouts
    heads = [op for op in graph.ops if "scaled_dot_product_attention" in op.target]
    assert len(heads) == LAYERS and all(found.strategies[op.name].output_layout(0)[1] == S(1) for op in heads)


def test_experts_are_split_inside():
    graph, found, megatron = hf_of(MixtralConfig(**SIZES, **HEADS_EACH, num_local_experts=4, num_experts_per_tok=2))
    assert found.layouts == megatron.layouts
    layouts = {item.fqn: format_layout(found.layouts[item.value.name]) for item in graph.of_kind("parameter")}
    for layer in range(LAYERS):
        assert layouts[f"model.layers.{layer}.mlp.experts.gate_up_proj"] == "BS(1)"
        assert layouts[f"model.layers.{layer}.mlp.experts.down_proj"] == "BS(2)"
        assert layouts[f"model.layers.{layer}.mlp.gate.weight"] == "BB"


@pytest.mark.parametrize("name", ["gpt2", "bert", "mlp"])
def test_models_without_a_plan_say_so(name):
    with pytest.raises(PlanError, match=r"no tensor-parallel plan.*megatron"):
        hf_styles(build(name).model)


def test_styles_without_a_like_are_named():
    model = nn.Linear(2, 2)
    model._tp_plan = {"experts": "ep_dispatch_experts"}
    with pytest.raises(PlanError, match=r"experts has style 'ep_dispatch_experts', expected one of .*colwise"):
        hf_styles(model)


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(PlanError, match=r"none of elsewhere is a module"):
        hand_plan(
            parse_hand_plan("hf", MESH), traced("mlp"), folded("mlp"), annotated("mlp"), MESH, {"elsewhere": "colwise"}
        )
    with pytest.raises(PlanError, match=r"styles=hf_styles"):
        hand_plan(parse_hand_plan("hf", MESH), traced("mlp"), folded("mlp"), annotated("mlp"), MESH)


@pytest.mark.multirank
def test_llama_trains_as_on_one_device(ranks4: Ranks):
    plan = plan_of(traced("llama"), hf_plan("llama"), MESH, CPU)
    for of_rank in ranks4.run(train_under, "llama", {"hf": plan}):
        assert of_rank[0]["first"][0] < 1e-5 and of_rank[0]["last"][0] < 1e-5
        assert of_rank[0]["issued"] == of_rank[0]["predicted"]
