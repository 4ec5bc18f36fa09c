"""Pages of a deep MLP, one of whose modules has a name that is a script, without and in stages."""

from functools import cache

import torch
from torch import nn

from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.page.page_data import PageData, plan_page
from autopar.page.plan_view import plan_view
from autopar.planner.choose import choose_plan
from autopar.planner.handwritten.named_plan import named_plans
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import plans_of_points
from autopar.plans.staged_plan import StagedPlan

CLUSTER = load_cluster("h100")
NAUGHTY = "<script>alert(1)<!--"
DEPTH = 6


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(DEPTH))
        self.blocks = nn.ModuleList(blocks)
        self.add_module(NAUGHTY, nn.Linear(256, 64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(getattr(self, NAUGHTY)(x), y)


@cache
def model() -> Deep:
    with torch.device("meta"):
        return Deep()


@cache
def graph() -> Graph:
    return trace(model(), (torch.zeros(4096, 256, device="meta"), torch.zeros(4096, 64, device="meta")), {})


@cache
def planned(mesh: str) -> AnyPlan:
    request = PlanRequest(num_microbatches=8 if mesh.startswith("pp") else None)
    return choose_plan(graph(), parse_mesh(mesh), CLUSTER, request)


@cache
def page(mesh: str) -> PageData:
    """The page of the plan on `mesh` beside its hand plans."""
    plan = planned(mesh)
    if isinstance(plan, StagedPlan):
        others = plans_of_points(plan)
    else:
        others = zip(plan.hand, named_plans(plan.hand, model(), plan.graph, plan.mesh, CLUSTER, PlanRequest()))
    views = [plan_view("this plan", plan), *(plan_view(name, other) for name, other in others)]
    return plan_page("a page", views, plan.hand)
