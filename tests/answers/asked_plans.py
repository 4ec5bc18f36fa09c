"""Plans of a deep MLP and its loss, with and without stages, that questions are asked about."""

from functools import cache

import torch
from torch import nn

from autopar.answers.questions import Asked
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest

CLUSTER = load_cluster("cpu")
FILE = """
import torch
from tests.answers.asked_plans import Deep

def build():
    with torch.device("meta"):
        return Deep(), (torch.zeros(64, 256), torch.zeros(64, 64)), {}

def deeper():
    with torch.device("meta"):
        return Deep(5), (torch.zeros(64, 256), torch.zeros(64, 64)), {}
"""  # for commands: `net.py:build` and `net.py:deeper`


class Deep(nn.Module):
    def __init__(self, depth: int = 4, width: int = 256) -> None:
        super().__init__()
        self.head = nn.Linear(width, 64)
        blocks = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(self.head(x), y)


@cache
def graph(depth: int = 4) -> Graph:
    with torch.device("meta"):
        return trace(Deep(depth), (torch.zeros(64, 256), torch.zeros(64, 64)), {})


@cache
def asked(mesh: str, depth: int = 4) -> Asked:
    """The best plan on `mesh`, to be asked about."""

    def planner(request, mesh):
        return choose_plan(graph(depth), mesh, CLUSTER, request)

    return Asked(planner(PlanRequest(), parse_mesh(mesh)), graph(depth), PlanRequest(), planner)
