"""Experts as stacks of weights (dispatch by masks, of fixed capacity) are exchanged by hand plans, and as priced."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.sbp.analysis.stacked_weights import num_experts
from bench.papers.gshard import MixtureLM
from tests.runtime.as_priced import are_as_priced
from tests.runtime.test_local_routing import TOLERANCE
from tests.runtime.training import forward_backward, issued, plan_called, planned, traced, under, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import Case

KINDS = {(4,): ("ep=4", "fsdp,ep=4"), (2, 2): ("dp=2,tp=2,ep=2", "ep=2", "ep=4")}
NUM_EXPERTS = 8


class Stack(nn.Module):
    """Gated experts with biases, by bmm, of tokens in slots."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(NUM_EXPERTS, 16, 32) / 4) for _ in range(2))
        self.bias, self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 1, 32)), nn.Parameter(torch.randn(8, 32, 16) / 6)
        self.slots, self.out = nn.Parameter(torch.randn(16, NUM_EXPERTS * 2)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The soft mixture of experts of arXiv:2308.00951: all tokens of a sample share its experts' slots."""
        scores = x @ self.slots
        slots = (scores.softmax(1).transpose(1, 2) @ x).unflatten(1, (NUM_EXPERTS, 2)).transpose(0, 1).flatten(1, 2)
        inner = F.silu(torch.bmm(slots, self.gate)) * (torch.bmm(slots, self.up) + self.bias)
        made = torch.bmm(inner, self.down).unflatten(1, (len(x), 2)).transpose(0, 1).flatten(1, 2)
        return F.mse_loss(self.out(scores.softmax(2) @ made), target)


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    if name == "soft":
        x = torch.randn(8, 12, 16)
        return Case(Stack(), (x, torch.randn_like(x)), {}, lambda loss: loss)
    model = MixtureLM(16, 4, 2, NUM_EXPERTS, sequence=16, vocabulary=64, group=32)
    for layer in model.layers:
        layer.key.bias = None  # whose gradient is zero but for rounding, for attention to all tokens
    ids = torch.randint(64, (16, 17))
    return Case(model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), {}, lambda loss: loss)


def train(name: str, plans: dict[str, Plan]) -> list[dict[str, Any]]:
    """On every rank: a step of each plan beside one device."""
    truth, reports = forward_backward(case_of(name)), []
    for plan in plans.values():
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, case_of(name), mesh)
        found = worst(forward_backward(case), truth, 1e-6)
        reports.append({"found": found, "issued": issued(case, mesh), "planned": Counter(planned(plan))})
    return reports


@pytest.mark.multirank
@pytest.mark.parametrize("shape", KINDS, ids=str)
@pytest.mark.parametrize("name", ["gshard", "soft"])
def test_trains_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    graph, mesh = traced(case_of(name)), Mesh(shape, ("dp", "tp")[: len(shape)])
    plans = {kind: plan_called(kind, graph, mesh) for kind in KINDS[shape]}
    for kind, plan in plans.items():
        sent = {x.kind for x in planned(plan)}
        assert "all_to_all" in sent, kind
    for reports in zip(*ranks4.run(train, name, plans)):
        assert all(report["found"][0] < TOLERANCE for report in reports), reports
        assert are_as_priced(reports, is_exact=True), reports


def test_each_expert_is_computed_on_one_rank() -> None:
    graph, mesh = traced(case_of("gshard")), Mesh((4,), ("dp",))
    assert num_experts(graph) == NUM_EXPERTS
    plan = plan_called("ep=4", graph, mesh)
    stacks = {item.value.name for item in graph.of_kind("parameter") if len(item.value.shape) == 3}
    used = {
        str(plan.assignment.strategies[op.name].input_layout(slot)[0])
        for op in graph.ops
        for slot, x in enumerate(op.inputs)
        if x.name in stacks
    }
    assert used == {"S(0)"} and all(str(plan.assignment.layouts[name][0]) == "S(0)" for name in stacks)


def test_heads_and_convolutions_are_no_experts() -> None:
    """Whose weights, a stack too, all take the same activation."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bshd,hdo->bso", torch.einsum("bso,hod->bshd", x, self.up).relu(), self.down).mean()

    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8))
    for model, x in ((Heads(), torch.randn(4, 6, 16)), (convolution, torch.randn(4, 3, 8, 8))):
        assert num_experts(traced(Case(model, (x,), {}, lambda loss: loss))) == 0
