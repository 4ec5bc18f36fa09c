"""Gradients are summed over ranks in the dtype that the user asks for, and move the bytes that the plan counts."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.training import Training
from autopar.errors import AutoparError
from autopar.ir.folding.fold import fold
from autopar.mesh import parse_mesh
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.plans.plan import Plan, plan_of
from autopar.plans.staged_plan import loads
from autopar.runtime.sharded_module import shard_module
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import I, R
from autopar.sbp.signature import Signature, Strategy
from tests.runtime.staged import plan_of_sample, sample, train_under
from tests.runtime.training import issued, planned, traced, whole
from tests.workers import Ranks, device_mesh
from tests.zoo import Case

WIDTH = 8
# The gradient of a weight's column is the sum of the batch's rows. Of two ranks or four, 256 + 1 + 1 is 258 in float32,
# which bfloat16 has, and 256 in bfloat16 where a one is added to 256 at a time.
ROWS = (256.0, 0.0, 1.0, 1.0)


class Cast(nn.Module):
    """A linear layer whose weights of float32 are cast, as under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.linear.weight.to(torch.bfloat16), self.linear.bias.to(torch.bfloat16)
        return nn.functional.linear(x, weight, bias).float()


class Narrow(Cast):
    """The same in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float()


MODELS = {"bfloat16": lambda: Narrow().bfloat16(), "cast": Cast}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    x = torch.tensor(ROWS, dtype=torch.bfloat16)[:, None].expand(len(ROWS), WIDTH).contiguous()
    return Case(MODELS[name](), (x,), {}, torch.sum)


def plan_by_hand(name: str, kind: str, mesh: str, training: Training) -> Plan:
    graph, own = training.reduced(traced(case_of(name))), parse_mesh(mesh)
    folded = fold(graph)
    assignment = hand_plan(parse_hand_plan(kind, own), graph, folded, annotate(graph, own, folded), own)
    return plan_of(graph, assignment, own, load_cluster("h100"), training=training)


def run(name: str, kind: str, mesh: str, training: Training) -> dict[str, Any]:
    """On each rank: the weight's gradient, and the collectives that are planned and issued."""
    plan, case = plan_by_hand(name, kind, mesh, training), case_of(name)
    devices = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
    module = shard_module(case.model, devices, lambda *_: loads(plan.dumps(), plan.graph, plan.mesh), outputs="sharded")
    case = case._replace(model=module)
    issued(case, devices)  # ranks compare what they load and are given in the first calls
    module.zero_grad()
    module._autopar.check = None
    counted = issued(case, devices)
    return {"gradient": whole(module.linear.weight.grad), "issued": counted, "planned": Counter(planned(plan))}


PLANS = [("ddp", "dp=4"), ("zero2", "dp=4"), ("zero3", "dp=4"), ("megatron:dp=2,tp=2", "dp=2,tp=2")]


def sum_bytes(counted: Counter) -> int:
    kinds = ("all_reduce", "reduce_scatter")
    return sum(n * c.num_bytes for c, n in counted.items() if c.phase == "backward" and c.kind in kinds)


@pytest.mark.multirank
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("kind", "mesh"), PLANS)
def test_gradients_are_summed_in_the_dtype_asked_for(ranks4: Ranks, name: str, kind: str, mesh: str) -> None:
    sums = {}
    for dtype in ("", "float32"):
        reports = ranks4.run(run, name, kind, mesh, Training(reduce_dtype=dtype))
        for report in reports:
            assert report["issued"] == report["planned"] and report["issued"], (dtype, report)
        sums[dtype] = sum_bytes(reports[0]["planned"])
        gradient = reports[0]["gradient"]
        assert gradient.dtype == (torch.float32 if name == "cast" else torch.bfloat16)
        if dtype:
            assert torch.equal(gradient.float(), torch.full((WIDTH, WIDTH), 258.0)), gradient
    assert sums["float32"] in (sums[""], 2 * sums[""]) and sums["float32"] > 0
    assert name == "cast" or sums["float32"] == 2 * sums[""]


@pytest.mark.multirank
def test_stages_sum_in_the_dtype_asked_for(ranks4: Ranks) -> None:
    """GPT-2 in float64, whose head is tied over two stages, summed in float32."""
    options = {"name": "gpt2", "blocks": 2}
    training = Training(reduce_dtype="float32")
    plan = plan_of_sample(sample(**options), "pp=2,dp=2", 2, "1f1b", training=training)
    wide = plan_of_sample(sample(**options), "pp=2,dp=2", 2, "1f1b")
    for result in ranks4.run(train_under, [(options, plan)]):
        (report,) = result
        assert report["issued"] == report["planned"]
        assert 1e-12 < max(report["first"], report["last"])[0] < 1e-5
    sums, wider = (
        sum(sum_bytes(Counter(planned(stage))) for stage in one.stages if one.stages) for one in (plan, wide)
    )
    assert 0 < sums < wider


def test_sums_in_a_wider_dtype_take_longer() -> None:
    """Data parallel gradients of bfloat16 summed in float32 take twice the time but for latencies."""
    narrow, wide = (plan_by_hand("bfloat16", "ddp", "dp=4", Training(reduce_dtype=x)) for x in ("", "float32"))
    slow = replace(load_cluster("h100"), levels=(replace(load_cluster("h100").levels[0], latency_s=0.0),))
    costs = [
        plan_of(plan.graph, plan.assignment, plan.mesh, slow, training=plan.training).costs.communication_s("backward")
        for plan in (narrow, wide)
    ]
    assert costs[1] == pytest.approx(2 * costs[0]) and costs[0] > 0


def test_a_plan_keeps_the_dtype_and_says_so() -> None:
    model, args = MODELS["bfloat16"](), case_of("bfloat16").args
    plan = autopar.plan(model, "dp=4", cluster="free-links", args=args, reduce_dtype=torch.float32)
    assert plan.training.reduce_dtype == "float32" and "gradients summed in float32" in plan.explain()
    again = loads(plan.dumps(), traced(case_of("bfloat16")), plan.mesh)
    assert again.training == plan.training and again.costs == plan.costs
    assert any(item.value.sum_dtype is torch.float32 for item in again.graph.of_kind("parameter"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32"])
def test_dtypes_that_are_no_sums(dtype: Any) -> None:
    with pytest.raises(AutoparError, match=r"reduce_dtype= expects one of torch\.float64, torch\.float32"):
        autopar.plan(MODELS["cast"](), "dp=4", cluster="free-links", args=case_of("cast").args, reduce_dtype=dtype)


class Alike(nn.Module):
    """A cast weight and an activation of one shape, which the same op reads and saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))

    def forward(self) -> torch.Tensor:
        return (2 * self.other).to(torch.bfloat16) * self.weight.to(torch.bfloat16)


def test_an_activation_beside_a_cast_weight_is_summed_in_its_own_dtype() -> None:
    graph = Training(reduce_dtype="float32").reduced(traced(Case(Alike(), (), {}, torch.sum)))
    whole, used = Strategy((Signature((I,), (I,)),)), Strategy((Signature((R, R), (R,)),))
    strategies = {op.name: used if len(op.inputs) == 2 else whole for op in graph.ops}
    layouts = {item.value.name: (I,) for item in graph.inputs}
    assignment = Assignment(strategies, layouts, {}, {value.name: (I,) for value in graph.outputs})
    costs = evaluate(graph, assignment, parse_mesh("4"), load_cluster("h100"))
    sizes = sorted(one.collective.num_bytes for one in costs.collectives)
    assert sizes == [2 * WIDTH * WIDTH, 4 * WIDTH * WIDTH]
