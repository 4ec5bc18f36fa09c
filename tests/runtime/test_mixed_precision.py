"""Parameters that are stored in float32 and computed in bfloat16: numbers, dtypes and bytes."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.precision.mixed_precision import computed_in, traced_in
from autopar.ir.trace_with_loss import traced
from autopar.mesh import parse_mesh
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.planner.request import training_in
from autopar.plans.plan import Plan, plan_of
from autopar.runtime.sharded_module import shard_module
from autopar.sbp.candidates import annotate
from autopar.verify.count_collectives import count_collectives
from tests.runtime.staged import Sample, _trained, loss_of, sample
from tests.runtime.training import LEAST, issued, planned, random_assignment, whole, worst
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


def steps_of(case: Sample, loss_of: Any, model: nn.Module, num_steps: int = 2) -> dict[str, Any]:
    """Gradients of the first step and the state after the last one, of AdamW over what is stored."""
    return _trained(case._replace(model=model), loss_of, lambda loss: None, num_steps)


def beside_one_device(name: str, options: dict[str, Any], plans: list[Any]) -> list[dict[str, Any]]:
    """On each rank: float64 models computed in float32 under each plan, beside one device that casts by hand."""
    case = sample(name, **options)
    computed = computed_in(F32, case.model)

    def one_device() -> torch.Tensor:
        loss = loss_of(case._replace(model=computed))
        loss.backward()
        return loss

    truth, reports = steps_of(case, one_device, case.model), []
    for plan in plans:
        case = sample(name, **options)
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        module = shard_module(case.model, mesh, lambda *_: plan, case.loss_fn, F32)  # noqa: B023
        module._autopar.prepare(module, case.args, case.kwargs, trains=True)
        with count_collectives(mesh) as counted:
            module.train_step(*case.args, **case.kwargs)
        module.zero_grad()
        found = steps_of(case, lambda: module.train_step(*case.args, **case.kwargs), module)  # noqa: B023
        dtypes = {x.dtype for what in found.values() for key, x in what.items() if key != "loss"}
        held = {key: {name: truth[key][name] for name in found[key]} for key in truth}
        distance = {key: worst(found[key], held[key], LEAST[key]) for key in found}
        reports.append({"issued": Counter(counted), "dtypes": dtypes, "code": module.code} | distance)
    return reports


def plans_of(name: str, options: dict[str, Any], reduce_dtype: torch.dtype) -> list[Any]:
    """Of each hand plan and some drawn ones."""
    case, training = sample(name, **options), training_in(F32, reduce_dtype)
    graph = training.reduced(traced_in(F32, traced, skeleton(case.model), case.loss_fn, case.args, case.kwargs))
    folded, plans = fold(graph), []
    for kind, mesh in KINDS[name]:
        own = parse_mesh(mesh)
        candidates = annotate(graph, own, folded)
        if kind.startswith("random"):
            assignment = random_assignment(graph, folded, candidates, own, random.Random(kind))
        else:
            assignment = hand_plan(parse_hand_plan(kind, own), graph, folded, candidates, own)
        plans.append(plan_of(graph, assignment, own, load_cluster("free-links"), training=training))
    return plans


KINDS = {
    "gpt2": [("zero3", "dp=4"), ("megatron:dp=2,tp=2,zero3", "dp=2,tp=2"), ("random:0", "dp=2,tp=2")],
    "vit": [("ddp", "dp=4"), ("random:1", "dp=2,tp=2")],
}


@pytest.mark.multirank
@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_one_device_that_casts_by_hand(ranks4: Ranks, name: str) -> None:
    options = {"blocks": 2}
    plans = plans_of(name, options, torch.float64)
    first, *_ = reports = ranks4.run(beside_one_device, name, options, plans)
    for plan, report in zip(plans, first, strict=True):
        assert report["issued"] == Counter(planned(plan)), report["code"]  # of parts that differ the first is priced
    for report in (report for of_rank in reports for report in of_rank):
        assert report["dtypes"] == {torch.float64}
        assert max(report["first"], report["last"])[0] < 1e-4, (report["first"], report["last"], report["code"])


STEPS = [
    ("dp=4", {"num_microbatches": 2}),
    ("pp=2,dp=2", {"num_microbatches": 2}),
    ("pp=2,dp=2", {"num_microbatches": 2, "schedule": "zero-bubble"}),
]


def train_step(mesh: str, options: dict[str, Any]) -> dict[str, Any]:
    case, own = case_of(), parse_mesh(mesh)
    devices = device_mesh(own.shape, own.axis_names)
    model = autopar.compile(case.model, devices, args=case.args, cluster="h100", param_dtype=BF16, **options)
    loss, scaler = model.train_step(*case.args), torch.amp.GradScaler("cpu", init_scale=4.0)
    here = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    found = {name: whole(p.grad) for name, p in here.items()}
    stored = {x.dtype for x in model.parameters()} | {x.dtype for x in found.values()}
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    scaled = model.train_step(*case.args, scaler=scaler)
    scaler.step(optimizer), scaler.update()
    after = {name: whole(p).detach() for name, p in here.items()}
    return {"gradients": found, "stored": stored, "losses": (loss, scaled), "after": after, "code": model.code}


@pytest.mark.multirank
@pytest.mark.parametrize(("mesh", "options"), STEPS)
def test_microbatches_and_stages_add_up_in_float32(ranks4: Ranks, mesh: str, options: dict[str, Any]) -> None:
    """With a scale of the loss too, by which an update is what it is without."""
    reports = ranks4.run(train_step, mesh, options)
    for report in reports:
        assert report["stored"] == {F32} and report["losses"][0] == report["losses"][1]
        if "second.weight" in report["gradients"]:
            found = report["gradients"]["second.weight"]
            assert torch.equal(found, torch.full((WIDTH, WIDTH), 257.0)), (found, report["code"])
            expected = case_of().model.second.weight.detach() - 257.0 / 256
            torch.testing.assert_close(report["after"]["second.weight"], expected, rtol=0, atol=1e-6)
    assert any("second.weight" in report["gradients"] for report in reports)
