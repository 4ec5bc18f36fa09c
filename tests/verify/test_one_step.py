"""A real step beside one device, its collectives and its sends beside those of the plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.mesh import parse_mesh
from autopar.models.target import load_target
from autopar.plans.staged_plan import StagedPlan
from autopar.verify.one_step import planned_sends, verify

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 3)

    def forward(self, x, target):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())

def build():
    return Net(), (torch.randn(8, 5, 8), torch.randint(0, 3, (8, 5))), {}
"""


@pytest.mark.multirank
@pytest.mark.parametrize("slow", ["between stages", "within a stage"])
def test_tensor_ranks_send_a_part_each_where_that_is_cheaper(tmp_path: Path, slow: str) -> None:
    (tmp_path / "nets.py").write_text(MODEL)
    target = f"{tmp_path}/nets.py:build"
    cluster = load_cluster("v100-25g")
    inner, outer = cluster.levels
    inner = replace(inner, size=2, latency_s=1e-2 if slow == "within a stage" else inner.latency_s)
    rate = outer.bandwidth_bytes_per_s / (1e4 if slow == "between stages" else 1)
    cluster = replace(cluster, levels=(inner, replace(outer, bandwidth_bytes_per_s=rate)))
    example, mesh = load_target(target, torch.float32), parse_mesh("pp=2,tp=2")
    options = {"num_microbatches": 2, "schedule": "1f1b", "cluster": cluster}
    found = autopar.plan(example.model, mesh, args=example.args, kwargs=example.kwargs, **options)
    assert isinstance(found, StagedPlan)
    ((kind, size),) = {send for send in planned_sends(found) if send[0] == "values"}
    whole = 4 * 5 * 8 * 4  # the samples of a microbatch, their length, width and bytes
    assert size == (whole / 2 if slow == "between stages" else whole), (kind, size)
    assert StagedPlan.loads(found.dumps(), found.graph, mesh).stages[0].assignment == found.stages[0].assignment
    outcome = verify(target, found)
    assert outcome.is_equal, outcome.text
    counted = f"values {2} {2 * size:.0f} {2} {2 * size:.0f}".split()
    assert counted in [line.split() for line in outcome.text.splitlines()], outcome.text
