"""Predicted steps against measured ones: GPT on V100 by OneFlow's DLPerf (OneFlow/LanguageModeling/GPT, report of
2021-05-12).
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.sbp.candidates import annotate

SEQUENCE, VOCABULARY, HIDDEN, HEADS, LAYERS = 2048, 51200, 1536, 16, 16

# (data parallel, tensor parallel, batch) -> milliseconds of a step of the 16-layer model
MEASURED_MS = {(1, 1, 2): 406, (8, 1, 16): 418, (1, 8, 16): 642, (2, 4, 16): 540, (4, 2, 16): 544}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x, mask):
        shape, y = (x.shape[0], SEQUENCE, HEADS, HIDDEN // HEADS), self.norm1(x)
        q, k, v = (layer(y).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * shape[-1] ** -0.5
        y = torch.softmax(scores.masked_fill(mask, -1e4), -1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Parameter(torch.zeros(SEQUENCE, HIDDEN))
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)
        self.register_buffer("mask", torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1))

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x, self.mask)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).float().flatten(0, 1), labels.flatten())


def gpt(batch: int) -> Graph:
    with torch.device("meta"):
        model, ids = GPT().half(), torch.zeros(batch, SEQUENCE, dtype=torch.long)
    return trace(model, (ids, ids), {})


def predicted_ms(graph: Graph, data_parallel: int, tensor_parallel: int) -> float:
    """With activation checkpointing, as measured: forward runs twice."""
    mesh = parse_mesh(f"dp={data_parallel},tp={tensor_parallel}")
    folded = fold(graph)
    candidates = annotate(graph, mesh, folded)
    plan = parse_hand_plan(f"megatron:dp={data_parallel},tp={tensor_parallel}", mesh)
    costs = evaluate(graph, hand_plan(plan, graph, folded, candidates, mesh), mesh, load_cluster("v100"))
    return 1e3 * (costs.step_s + costs.compute_forward_s + costs.communication_s("forward"))


@pytest.fixture(scope="module")
def predictions() -> dict[tuple[int, int, int], float]:
    graphs = {batch: gpt(batch) for batch in {batch for _, _, batch in MEASURED_MS}}
    return {(dp, tp, batch): predicted_ms(graphs[batch], dp, tp) for dp, tp, batch in MEASURED_MS}


def test_each_step_is_predicted_within_a_fifth(predictions):
    for plan, measured_ms in MEASURED_MS.items():
        assert abs(math.log(predictions[plan] / measured_ms)) < 0.2, (plan, predictions[plan], measured_ms)


def test_plans_are_ordered_as_measured(predictions):
    for one, one_ms in MEASURED_MS.items():
        for other, other_ms in MEASURED_MS.items():
            if one_ms * 1.02 < other_ms:  # (2, 4) and (4, 2) took the same time
                assert predictions[one] < predictions[other], (one, other)
