"""Plans made on the short graph are those made on the whole one."""

import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.sbp.analysis.sample_blocks import shorten
from autopar.sbp.candidates import annotate
from tests.planner.cases import MESH
from tests.zoo import HEADS, HIDDEN, SEQUENCE, VOCABULARY

LAYERS = 6


@functools.cache
def deep(name: str) -> Graph:
    if name == "llama":
        sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS}
        config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=HEADS, use_cache=False, **sizes)
        model = LlamaForCausalLM(config)
    else:
        sizes = {"d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 2 * HIDDEN, "num_layers": LAYERS}
        config = T5Config(
            vocab_size=VOCABULARY, num_heads=HEADS, use_cache=False, decoder_start_token_id=0, pad_token_id=0, **sizes
        )
        model = T5ForConditionalGeneration(config)
    tokens = torch.zeros(8, SEQUENCE, dtype=torch.long)
    return trace(skeleton(model), (), {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False})


def folds(graph: Graph) -> dict[str, Folded]:
    names = [op.name for op in graph.ops] + [item.value.name for item in graph.inputs]
    plain = fold(graph)
    return {
        "none": Folded({name: name for name in names}, ()),
        "plain": plain,
        "ends": segmented(plain, graph, ends_apart(plain)),
    }


@pytest.mark.parametrize("kind", ["ddp", "zero3", "megatron", "megatron:sp", "megatron:sp,zero3"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_hand_plans_do_not_depend_on_what_is_folded(name, kind):
    graph = deep(name)
    found = {
        way: hand_plan(parse_hand_plan(kind, MESH), graph, folded, annotate(graph, MESH, folded), MESH)
        for way, folded in folds(graph).items()
    }
    for way in ("plain", "ends"):
        assert found[way].strategies == found["none"].strategies, way
        assert found[way].layouts == found["none"].layouts, way
        assert found[way].kept == found["none"].kept, way
        assert found[way].outputs == found["none"].outputs, way


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_three_copies_stay_and_stand_for_all(name):
    graph, folded = deep(name), folds(deep(name))["plain"]
    short = shorten(graph, folded)
    left = {len(repeat.ops) * (repeat.count - 3) for repeat in folded.repeats}
    assert len(graph.ops) - len(short.graph.ops) == sum(left) > 0
    assert sum(short.counts.values()) == sum(len(repeat.ops) * repeat.count for repeat in folded.repeats)
    known = {item.value.name for item in short.graph.inputs}
    for op in short.graph.ops:
        assert all(value.name in known for value in op.inputs)
        known.update(value.name for value in op.outputs)
