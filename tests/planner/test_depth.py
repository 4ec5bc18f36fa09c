"""Depth costs nothing: searches, tables and priced ops of a plan are as many for any number of layers, whether memory
binds or not.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.pricing import price as pricing
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.planner import problem
from autopar.planner.budget import Budget
from autopar.planner.choose import choose_plan
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.request import PlanRequest

V100, MESH = load_cluster("v100"), parse_mesh("2x4")
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}


def llama(layers: int) -> Graph:
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, vocab_size=512, **SIZES))
    ids = torch.zeros(16, 256, dtype=torch.long)
    return trace(skeleton(model), (), {"input_ids": ids, "labels": ids.clone()})


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """The nodes of each table that is searched, and the ops of each graph that is priced."""
    counts: dict[str, list[int]] = {"nodes": [], "ops": []}
    solve, price_nodes = problem.solve, pricing.price_nodes
    with monkeypatch.context() as patch:
        patch.setattr(
            problem, "solve", lambda table, **how: counts["nodes"].append(len(table.nodes)) or solve(table, **how)
        )
        patch.setattr(
            pricing,
            "price_nodes",
            lambda graph, *rest: counts["ops"].append(len(graph.ops)) or price_nodes(graph, *rest),
        )
        yield counts


@pytest.mark.parametrize("part", [1.0, 0.6], ids=["memory is ample", "memory binds"])
def test_a_deeper_model_takes_no_more_searches_and_no_larger_tables(part: float, monkeypatch: pytest.MonkeyPatch):
    known = {}
    for layers in (12, 36):
        graph = llama(layers)
        free = make_plan(graph, MESH, V100, PlanRequest(memory_limit_bytes=1e12), budget=Budget.of(60))
        request = PlanRequest(memory_limit_bytes=part * free.costs.total_memory_bytes / 0.85, time_limit_s=120)
        with counted(monkeypatch) as known[layers]:
            assert choose_plan(graph, MESH, V100, request).step_s >= free.step_s * (1 - 1e-9)
    shallow, deep = known[12], known[36]
    assert len(deep["nodes"]) <= len(shallow["nodes"]) and max(deep["nodes"]) <= max(shallow["nodes"])
    assert len(deep["ops"]) <= len(shallow["ops"]) and max(deep["ops"]) <= max(shallow["ops"])
