"""What is told to be whole although large costs what the plan with it split has less."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.costmodel.roofline import op_time
from autopar.explain.explain_plan import explain
from autopar.explain.stayed_whole import LARGE, stayed_whole
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import plan_of
from autopar.sbp.placement import I, S
from tests.answers.asked_plans import CLUSTER, Deep, graph

MESH = Mesh((2, 2), ("dp", "tp"))


def by_hand(name, mesh=MESH, traced=None):
    return named_plan(name, Deep(), traced or graph(), mesh, CLUSTER, PlanRequest())


class Normed(nn.Module):
    """A layer whose result is whole on a tensor-parallel axis is normed, which ranks of that axis repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x).relu())).square().mean()


def test_a_parameter_costs_what_its_split_would_save():
    plan = by_hand("ddp")
    rows = {row.name: row for row in stayed_whole(plan)}
    row = rows["blocks.1.0.weight"]
    assert row.count >= 1 and row.axes == "dp+tp"
    copies = {item.value.name: item.fqn for item in plan.graph.inputs}
    first = plan.folded.representative
    names = [name for name, fqn in copies.items() if copies[first[name]] == row.name]
    assert len(names) == row.count
    split = {**plan.assignment.layouts, **dict.fromkeys(names, (S(0), S(0)))}
    other = plan_of(plan.graph, replace(plan.assignment, layouts=split), plan.mesh, plan.cluster)
    kinds = ("parameters", "gradients", "optimizer")
    saved = sum(plan.costs.memory_bytes[kind] - other.costs.memory_bytes[kind] for kind in kinds)
    assert row.num_bytes == saved
    assert row.time_s == pytest.approx(plan.costs.optimizer_s - other.costs.optimizer_s, rel=1e-6)


def test_an_op_costs_the_time_that_ranks_repeat():
    with torch.device("meta"):
        plan = by_hand("megatron:dp=2,tp=2", traced=trace(Normed(), (torch.zeros(4096, 64),), {}))
    rows = {row.name: row for row in stayed_whole(plan)}
    ops = {op.name: op for op in plan.graph.ops}
    found = {name.removeprefix("%"): row for name, row in rows.items() if name.startswith("%")}
    assert {"aten.add.Tensor", "aten.layer_norm.default"} <= {ops[name].target for name in found}
    for name, row in found.items():
        whole = plan.assignment.strategies[name].output_layout(0)
        assert row.axes == "tp" and whole[1] == I
        each_s = sum(op_time(ops[name], plan.assignment.strategies[name], (2, 2), CLUSTER))
        assert row.time_s == pytest.approx(row.count * each_s / 2)
        assert max(row.num_bytes / plan.costs.total_memory_bytes, row.time_s / plan.costs.step_s) >= LARGE


def test_it_is_told_and_not_where_nothing_is_whole():
    assert "Whole although large" in explain(by_hand("ddp"))
    alone = by_hand("ddp", Mesh((1, 1), ("dp", "tp")))
    assert not stayed_whole(alone) and "Whole although large" not in explain(alone)
