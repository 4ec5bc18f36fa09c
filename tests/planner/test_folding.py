"""Searching one copy of a repeat instead of all loses nothing: the same problem without
folding has the same optimum.
"""

import functools
import math

import pytest
import torch

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.pricing import price as pricing
from autopar.costmodel.pricing.price import price
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.request import PlanRequest
from autopar.sbp.candidates import annotate
from autopar.search.deadline import Deadline
from autopar.search.solve import solve

V100 = load_cluster("v100")


def _tokens(**sizes) -> dict:
    ids = torch.zeros(8, 128, dtype=torch.long)
    return {"input_ids": ids, "labels": torch.zeros_like(ids)} | sizes


def _gpt2(layers: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    return (
        GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=256, n_head=8, vocab_size=512, n_positions=128, use_cache=False)
        ),
        _tokens(),
    )


def _llama(layers: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    }
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)), _tokens()


def _bert(layers: int):
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 512}
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers, **sizes)), _tokens()


def _t5(layers: int):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_heads": 8, "vocab_size": 512, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(num_layers=layers, use_cache=False, **sizes)), _tokens()


BUILD = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5}


@functools.cache
def traced(name: str, layers: int) -> Graph:
    with torch.device("meta"):
        model, batch = BUILD[name](layers)
    return trace(skeleton(model), (), batch)


def unfolded(graph: Graph) -> Folded:
    names = [op.name for op in graph.ops] + [item.value.name for item in graph.inputs]
    return Folded({name: name for name in names}, ())


@pytest.mark.parametrize("mesh", ["8", "4x2"])
@pytest.mark.parametrize(("name", "layers"), [("gpt2", 4), ("llama", 6), ("bert", 8), ("t5", 4)])
def test_the_folded_optimum_is_that_of_all_layers(name, layers, mesh, monkeypatch):
    monkeypatch.setattr(pricing, "priced_buckets", lambda *_: {})  # of blocks, which the unfolded graph has not
    graph, mesh = traced(name, layers), parse_mesh(mesh)
    assert fold(graph).repeats, "nothing repeats: this would test nothing"
    every = unfolded(graph)
    table = price(graph, every, annotate(graph, mesh, every), mesh, V100).table
    whole = solve(table, deadline=Deadline.after(60.0))
    plan = make_plan(graph, mesh, V100, PlanRequest(memory_limit_bytes=math.inf))
    assert whole.gap < 1e-6 and plan.gap < 1e-6
    assert plan.costs.step_s == pytest.approx(whole.cost_s, rel=1e-8)
