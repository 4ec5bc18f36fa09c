"""Hand plans with the letters pp and vp are the points of the sweep with the same layouts, or refused by name."""

import pytest
import torch
from torch import nn

from autopar.cli.main import main
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import PlanError
from autopar.ir.folding.fold import fold
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.trace_with_loss import traced
from autopar.mesh import Devices, Mesh, parse_devices
from autopar.planner.handwritten.hand_plan import parse_hand_plan
from autopar.planner.pipeline.hand_points import model_of
from autopar.planner.pipeline.sweep import _Sweep
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages, is_in_stages
from bench.problem import example_of, graph_of
from bench.suite import Case

CLUSTER = load_cluster("v100-25g")


@pytest.fixture(scope="module")
def graph():
    return loss_only(graph_of(example_of(Case("gpt2", "v100-25g", "8", 16, sequence=64, layers=8))))


def by_hand(graph, text, mesh, **asked):
    return hand_plan_in_stages(text, graph, mesh, CLUSTER, PlanRequest(**asked))


@pytest.mark.parametrize(
    ("text", "schedule", "flavour"),
    [("pp=2,zero2,tp=2,sp", "1f1b", "zero2"), ("megatron:dp=2,tp=2,sp,zero3,pp=2,vp=2", "interleaved", "zero3")],
)
def test_letters_are_the_point_of_the_sweep(graph, text, schedule, flavour):
    plan = by_hand(graph, text, Devices(8, 0), num_microbatches=4)
    assert plan.mesh == Mesh((2, 2, 2), ("pp", "dp", "tp"))
    assert plan.schedule.name == schedule and plan.found_by == f"hand plan {text}"
    assert len(plan.stages) == (2 if schedule == "1f1b" else 4)
    model = model_of(graph, fold(graph))
    mesh = Mesh((2, 2), ("dp", "tp"))
    written = parse_hand_plan(f"megatron:dp=2,tp=2,sp,{flavour}", mesh)
    points = _Sweep(model, CLUSTER, PlanRequest(training=plan.training, memory_limit_bytes=1e12)).on(
        (written,), mesh, 2, 4, (schedule,)
    )
    best = min(point.step_s for point in points if point.schedule.num_stages == len(plan.stages))
    assert 0.95 * best <= plan.step_s <= 1.25 * best  # whose cut may be better than the even one


def test_the_mesh_may_be_given_and_microbatches_need_no_stages(graph):
    open_mesh = by_hand(graph, "fsdp,pp=2", Devices(8, 0), num_microbatches=4)
    given = by_hand(graph, "fsdp", Mesh((4, 2), ("dp", "pp")), num_microbatches=4)
    assert given.step_s == open_mesh.step_s
    alone = by_hand(graph, "fsdp", Devices(8, 0), num_microbatches=2)
    assert alone.schedule.name == "accumulate" and alone.schedule.num_microbatches == 2


@pytest.mark.parametrize(
    ("text", "mesh", "asked", "told"),
    [
        ("fsdp,pp=2", "8", {}, "give its number of microbatches, e.g. --microbatches 8"),
        ("fsdp,pp=3", "8", {"num_microbatches": 4}, "does not fit 8 devices"),
        ("fsdp,pp=two", "8", {"num_microbatches": 4}, "pp= expects a positive number, found 'two'"),
        ("fsdp,pp=2", "8", {"num_microbatches": 3}, "is not cut into 3 microbatches on 4 data ranks"),
        ("fsdp,pp=4", "pp=2,dp=4", {"num_microbatches": 4}, "its axis pp has 2 ranks"),
        ("fsdp,pp=2,ep=2", "8", {"num_microbatches": 4}, "no experts whose rows can be exchanged"),
        ("fsdp,pp=4", "8", {"num_microbatches": 4, "schedule": "interleaved"}, "does not run 1 stages a rank"),
        ("fsdp,pp=16,vp=4", "16", {"num_microbatches": 16}, "blocks make no 64 stages"),
        ("hf,pp=2", "8", {"num_microbatches": 4}, "hf, has no stages"),
        ("pp=2,zero9", "8", {"num_microbatches": 4}, "no hand plan"),
    ],
)
def test_what_is_no_plan_in_stages_is_refused_by_name(graph, text, mesh, asked, told):
    with pytest.raises(PlanError, match=told):
        by_hand(graph, text, parse_devices(mesh), **asked)


def test_a_model_without_microbatches_is_refused_with_its_reason():
    """It was told that its batch of 8 is not cut into 4."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)))
    graph = traced(model, nn.MSELoss(), (torch.randn(8, 8), torch.randn(8, 8)), {})
    with pytest.raises(PlanError, match=r"hand plan 'pp=2,fsdp': .*one microbatch"):
        by_hand(graph, "pp=2,fsdp", Devices(4, 0), num_microbatches=4)


def test_a_plan_without_stages_is_none_of_these():
    assert not is_in_stages("fsdp,tp=2", Devices(8, 0), PlanRequest())
    assert is_in_stages("fsdp,vp=2", Devices(8, 0), PlanRequest())
    assert is_in_stages("fsdp", Mesh((2, 4), ("pp", "dp")), PlanRequest())


def test_the_command_explains_the_stages_of_a_hand_plan(capsys):
    arguments = ["--mesh", "8", "--cluster", "v100-25g", "--hand", "pp=2,fsdp", "--microbatches", "4"]
    assert main(["explain", "gpt2", *arguments]) == 0
    text = capsys.readouterr().out
    assert "found by hand plan pp=2,fsdp; no lower bound" in text and "1f1b, 2 stages on 2 ranks" in text
    assert main(["explain", "gpt2", *arguments[:4], "--hand", "ds.json", "--microbatches", "4"]) == 2
    assert "write its letters, such as --hand pp=4" in capsys.readouterr().err
