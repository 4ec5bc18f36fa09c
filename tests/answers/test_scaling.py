import csv
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar import plan
from autopar.answers.scaling import batch_of, peak_s, point_of, points_csv
from autopar.cli import main
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.trace import trace
from autopar.jobs.workload import read_curves
from autopar.mesh import Devices
from autopar.models.catalogue import build_model
from autopar.models.target import load_target
from autopar.planner.choose import choose_plan
from tests.answers.asked_plans import CLUSTER, Deep, asked, graph

FILE = """
import torch
from tests.answers.asked_plans import Deep

def build(batch=64):
    with torch.device("meta"):
        return Deep(), (torch.zeros(batch, 256), torch.zeros(batch, 64)), {}
"""


def test_flops_are_those_that_torch_counts():
    model, x, y = Deep(), torch.zeros(64, 256), torch.zeros(64, 64)
    with FlopCounterMode(display=False) as counter:
        model(x, y).backward()
    peak = CLUSTER.peak_flops_per_s(torch.float32)
    # the first layer's input needs no gradient, for torch and for us
    assert peak_s(graph(), CLUSTER) == pytest.approx(counter.get_total_flops() / peak)


def test_presets_have_the_peak_of_the_datasheet():
    h100 = load_cluster("h100")
    seconds = peak_s(graph(), h100) * h100.peak_flops_per_s(torch.float32)
    assert seconds == pytest.approx(0.55 * peak_s(graph(), CLUSTER) * CLUSTER.peak_flops_per_s(torch.float32))


def test_figures_of_a_point():
    plan = asked("dp=2,tp=2").plan
    point = point_of("deep", plan, price_per_hour=3.6)
    assert batch_of(graph()) == (64, 0) and point.samples_per_s == pytest.approx(64 / plan.step_s)
    # a step of 4 devices at 0.001 a second each, 64 samples
    assert point.cost_per_million == pytest.approx(4 * 0.001 * plan.step_s / 64 * 1e6)
    gpt = build_model("gpt2", layers=1, batch=2, sequence=8)
    assert batch_of(trace(gpt.model, gpt.args, dict(gpt.kwargs))) == (2, 16)


def test_each_point_is_the_plan_made_for_it_alone_and_jobs_can_be_scheduled_by_them(tmp_path, capsys):
    (tmp_path / "net.py").write_text(FILE)
    target, table = f"{tmp_path}/net.py:build", tmp_path / "steps.csv"
    assert main(["sweep", target, "--devices", "2,4", "--cluster", "cpu", "--csv", str(table), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    alone = [choose_plan(graph(), Devices(n), CLUSTER).step_s for n in (2, 4)]
    assert [point["step_s"] for point in points] == pytest.approx(alone)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    jobs = [f'{n},0,{target},{row["devices"]},"{row["plan"]}",10' for n, row in enumerate(rows)]
    (tmp_path / "jobs.csv").write_text("job,submitted_s,model,devices,plan,steps\n" + "\n".join(jobs) + "\n")
    assert read_curves([table])[target].step_s(4) == pytest.approx(min(alone))
    command = ["schedule", str(tmp_path / "jobs.csv"), "--devices", "4", "--steps", str(table)]
    assert main([*command, "--policy", "asked", "--policy", "gain", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["asked"]["jobs"][0]["ended_s"] == pytest.approx(10 * alone[0])
    assert main([*command[:3], "3", *command[4:]]) == 2
    assert "asks for 4 devices, the cluster has 3" in capsys.readouterr().err


def test_a_point_is_planned_in_the_dtype_asked_for(tmp_path, capsys):
    (tmp_path / "net.py").write_text(FILE)
    command = ["sweep", f"{tmp_path}/net.py:build", "--devices", "2", "--cluster", "h100", "--json"]
    assert main([*command, "--param-dtype", "bfloat16", "--reduce-dtype", "bfloat16"]) == 0
    (point,) = json.loads(capsys.readouterr().out)
    example, dtypes = load_target(command[1]), {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    alone = [plan(example.model, Devices(2), args=example.args, cluster="h100", **given) for given in (dtypes, {})]
    assert point["step_s"] == pytest.approx(alone[0].step_s)
    assert point["step_s"] < 0.95 * alone[1].step_s


def test_points_that_are_planned_in_turn_are_the_plans_made_for_them_alone():
    shared = graph()  # what is known of it from one point is used for the next
    for devices in (8, 4, 2):
        plan, alone = (choose_plan(one, Devices(devices), CLUSTER) for one in (shared, graph()))
        assert (plan.step_s, plan.lower_bound_s, str(plan.mesh)) == (alone.step_s, alone.lower_bound_s, str(alone.mesh))


def test_points_without_a_plan_say_why(tmp_path, capsys):
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "small.json").write_text(CLUSTER.to_json().replace(str(CLUSTER.memory_bytes), "1000"))
    command = ["sweep", f"{tmp_path}/net.py:build", "--devices", "1", "--cluster", str(tmp_path / "small.json")]
    assert main(command) == 2
    assert "fits" in capsys.readouterr().out
    assert points_csv(()).startswith("model,cluster,devices")
    assert main([*command, "--price", "-1"]) == 2
