"""Microbatches add ops inside blocks that repeat: those of copies alike are alike, whatever follows what."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.evaluate import evaluate
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.pipeline.cut_stages import Cut, cut_as
from autopar.planner.pipeline.hand_points import Model, model_of
from autopar.planner.pipeline.sweep import sweep
from autopar.planner.request import PlanRequest
from tests.planner.cases import CPU

WIDTH = 16
ONE = Mesh((1,), ("dp",))


class Block(nn.Module):
    """kind "dense"; "loss": adds a mean over the batch to the loss; "weight": adds a term of its weight; "scaled": by a
    shared constant.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, loss: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.relu(self.up(x))
        if self.kind == "loss":
            loss = loss + y.square().mean()
        elif self.kind == "weight":
            loss = loss + self.up.weight.square().sum()
        elif self.kind == "scaled":
            y = y * mask
        return x + self.down(y), loss


class Blocks(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, kinds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss, mask = x.square().mean(), torch.arange(2 * WIDTH, dtype=x.dtype)
        for block in self.blocks:
            x, loss = block(x, loss, mask)
        return loss + x.square().mean()


def random_kinds(rng: random.Random) -> list[str]:
    """A few runs of a kind or of a pattern of two."""
    kinds: list[str] = []
    for _ in range(rng.randint(1, 3)):
        pattern = rng.choices(["dense", "loss", "weight", "scaled"], k=rng.choice([1, 1, 2]))
        kinds += pattern * rng.randint(1, 7)
    return kinds


def cut_by_sweep(graph: Graph, num_microbatches: int) -> tuple[Model, Cut]:
    model = model_of(graph, fold(graph))
    pipeline = ((min(2, len(model.starts)), ONE),)
    found = sweep(model, pipeline, CPU, PlanRequest(memory_limit_bytes=math.inf, num_microbatches=num_microbatches))
    return model, cut_as(model, found[0])


def check(graph: Graph, num_microbatches: int) -> None:
    """Every op and value of the microbatch has its part of the plan; the copies that are run again are those of the
    whole batch.
    """
    model, cut = cut_by_sweep(graph, num_microbatches)
    assignment, micro = cut.by_hand, cut.graph
    assert assignment.strategies.keys() == {op.name for op in micro.ops}
    assert assignment.layouts.keys() == {item.value.name for item in micro.inputs}
    assert assignment.kept.keys() == {name for name, uses in micro.uses.items() if len(uses) > 1}
    assert evaluate(micro, assignment, ONE, CPU).memory_bytes["activations"] > 0
    known = {op.name for op in graph.ops}
    again = [tuple(name for name in region if name in known) for region in cut.regions]
    assert again == list(recomputable(model.folded, graph))


@pytest.mark.parametrize("seed", range(10))
def test_blocks_of_any_kinds_in_any_order(seed: int) -> None:
    kinds = random_kinds(random.Random(seed))
    graph = trace(skeleton(Blocks(kinds)), (torch.zeros(8, 4, WIDTH),), {})
    check(graph, 2)


@pytest.mark.parametrize("dense", [[0], [0, 2, 4, 6], [4, 5, 6, 7, 8]])
def test_dense_blocks_among_blocks_of_experts(dense: list[int]) -> None:
    """As in DeepSeek-V3: a KeyError once some copies of the blocks with experts were dropped."""
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 9,
        "vocab_size": 32,
    }
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, mlp_only_layers=dense, use_cache=False))
    tokens = torch.zeros(4, 8, dtype=torch.long)
    check(trace(skeleton(model), (), {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}), 2)
