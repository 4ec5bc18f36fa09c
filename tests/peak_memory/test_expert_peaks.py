"""Peaks of plans that split experts, whose rows are known only when the program runs."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from autopar.costmodel.training import WHOLE_BATCH
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.peak_memory.predict import predict_peak
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate

MESH = Mesh((4,), ("ep",))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_plan_that_splits_experts_has_a_peak(device_type: str):
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(4, 16, dtype=torch.long)
    graph = trace(skeleton(model), (), {"input_ids": tokens, "labels": tokens.clone()})
    folded = fold(graph)
    candidates = annotate(graph, MESH, folded)
    by_hand = hand_plan(parse_hand_plan("ddp", MESH), graph, folded, candidates, MESH)
    same = folded.representative
    strategies = {op.name: candidates.strategies[same[op.name]][0] for op in graph.ops}  # all tokens on every rank
    whole = Assignment(strategies, by_hand.layouts, {}, by_hand.outputs)
    by_expert = {
        op.name: next(one for one in candidates.strategies[op.name] if one.signatures[0].role == "experts")
        for op in graph.ops
        if "grouped_mm" in op.target
    }
    assert by_expert, "no grouped products were traced"
    split = Assignment(whole.strategies | by_expert, whole.layouts, whole.kept, whole.outputs, whole.regathered)
    peaks = [predict_peak(graph, MESH, one, training=WHOLE_BATCH, on=device_type).total_bytes for one in (whole, split)]
    assert all(peak > 0 for peak in peaks)
