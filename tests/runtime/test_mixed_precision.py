"""Parameters that are stored in float32 and computed in bfloat16: numbers, dtypes and bytes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.precision.mixed_precision import traced_in
from autopar.ir.trace_with_loss import traced
from autopar.mesh import parse_mesh
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.planner.request import training_in
from autopar.plans.plan import Plan, plan_of
from autopar.sbp.candidates import annotate
from tests.runtime.training import issued, planned, whole
from tests.workers import Ranks, device_mesh
from tests.zoo import Case

WIDTH = 16
# The gradient of a weight is the sum of these rows: 257 in float32, 256 where any sum over ranks or microbatches, or
# what is made of it, is rounded to bfloat16.
ROWS = (256.0, 0.0, 1.0, 0.0)
BF16, F32 = torch.bfloat16, torch.float32


class Layers(nn.Module):
    """Two layers of which the second one's weight has a gradient that bfloat16 has not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(WIDTH))
            self.first.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def case_of() -> Case:
    torch.manual_seed(0)
    return Case(Layers(), (torch.tensor(ROWS)[:, None].expand(len(ROWS), WIDTH).contiguous(),), {}, lambda x: x)


def plan_by_hand(kind: str, mesh: str, reduce_dtype: torch.dtype | None = None) -> Plan:
    case, own, training = case_of(), parse_mesh(mesh), training_in(BF16, reduce_dtype)
    graph = training.reduced(traced_in(BF16, traced, skeleton(case.model), None, case.args, {}))
    folded = fold(graph)
    assignment = hand_plan(parse_hand_plan(kind, own), graph, folded, annotate(graph, own, folded), own)
    return plan_of(graph, assignment, own, load_cluster("h100"), training=training)


def run(plan: Plan, tmp: str) -> dict[str, Any]:
    case = case_of()
    devices = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
    path = f"{tmp}/plan-{torch.distributed.get_rank()}.json"
    plan.save(path)
    module = autopar.compile(case.model, devices, plan=path, args=case.args, check=False)
    case = case._replace(model=module)
    issued(case, devices)
    module.zero_grad()
    counted = issued(case, devices)
    gradients = {name: whole(p.grad) for name, p in module.named_parameters()}
    return {"gradients": gradients, "issued": counted, "planned": Counter(planned(plan)), "code": module.code}


PLANS = [("ddp", "dp=4"), ("zero2", "dp=4"), ("zero3", "dp=4"), ("megatron:dp=2,tp=2,zero3", "dp=2,tp=2")]


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "mesh"), PLANS)
def test_gradients_are_summed_in_float32_and_not_rounded(ranks4: Ranks, tmp_path: Any, kind: str, mesh: str) -> None:
    for dtype, expected in ((None, 257.0), (BF16, 256.0)):
        plan = plan_by_hand(kind, mesh, dtype)
        for report in ranks4.run(run, plan, str(tmp_path)):
            assert report["issued"] == report["planned"] and report["issued"], report["code"]
            assert {x.dtype for x in report["gradients"].values()} == {F32}
            found = report["gradients"]["second.weight"]
            assert torch.equal(found, torch.full((WIDTH, WIDTH), expected)), (found, report["code"])


def reference(model: nn.Module, args: tuple, kwargs: dict) -> Any:
    """On one device, the same casts by hand."""

    def cast(x: Any) -> Any:
        return x.to(BF16) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    cast_parameters = {name: p.to(BF16) for name, p in model.named_parameters()}
    return functional_call(model, cast_parameters, tuple(map(cast, args)), {k: cast(x) for k, x in kwargs.items()})
