import json

import pytest

from autopar.answers.smallest_change import ENOUGH, by_bisection
from autopar.cli import main
from autopar.cli.fit_command import FitTask, smallest_changes
from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.planner.request import PlanRequest
from tests.answers.asked_plans import CLUSTER, asked

FILE = """
import torch
from tests.answers.asked_plans import Deep

def build(batch=4096):
    with torch.device("meta"):
        return Deep(), (torch.zeros(batch, 256), torch.zeros(batch, 64)), {}
"""


@pytest.mark.parametrize("least", [1, 3, 17, 100, 1000])
def test_what_fits_and_what_does_not_are_close(least):
    plan = asked("dp=2,tp=2").plan

    def attempt(value):
        if value < least:
            raise InfeasibleError("too small")
        return plan

    found = by_bisection("size", attempt, 0.5, (2**n for n in range(12)), str)
    assert found.plan is plan and float(found.refused) < least <= float(found.after) <= ENOUGH * float(found.refused)
    assert by_bisection("size", attempt, 0.5, (0.6, 0.7), str).plan is (None if least > 0.7 else plan)


def test_each_change_fits_and_a_tenth_less_does_not(tmp_path, capsys):
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "small.json").write_text(CLUSTER.to_json())
    command = [f"{tmp_path}/net.py:build", "--mesh", "dp=2", "--cluster", str(tmp_path / "small.json")]
    assert main(["fit", *command, "--memory-limit", "14MiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    changes = {each["what"]: each for each in told["changes"]}
    assert told["refusal"] and changes.keys() == {"memory of a device", "devices", "batch", "dtype", "optimizer"}
    for name, change in changes.items():
        if change["step_s"] is not None and name != "memory of a device":
            assert change["memory_bytes"] <= 14 * 2**20, name
    assert changes["devices"]["to"].startswith("dp=")
    memory = changes["memory of a device"]
    assert float(memory["to"].split()[0]) <= 1.11 * float(memory["refused"].split()[0])
    assert main(["fit", *command]) == 0 and "A plan fits" in capsys.readouterr().out


def test_a_size_is_changed_from_the_one_that_was_asked_for(tmp_path):
    (tmp_path / "net.py").write_text(FILE)
    request = PlanRequest(memory_limit_bytes=14 * 2.0**20)
    task = FitTask(f"{tmp_path}/net.py:build", Mesh((2,), ("dp",)), CLUSTER, request, (("batch", 2048),))
    batch = next(each for each in smallest_changes(task, lambda _: None) if each.what == "batch")
    assert batch.before == "2048" and float(batch.refused) <= 2048
