"""The command as a user meets it: output, exit status, errors without traceback."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.cli import main
from autopar.cli.main import parse_bytes
from autopar.verify.one_step import difference

FILE = """
import torch
from torch import nn
from torch.nn.functional import mse_loss


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16))

    def forward(self, x, y):
        return mse_loss(self.body(x), y)


def build():
    return Net(), (torch.randn(8, 16), torch.randn(8, 16)), {}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return mse_loss(x, y)


def deep():
    return Deep(), (torch.randn(8, 16), torch.randn(8, 16)), {}


def without_loss():
    return Net().body, (torch.randn(8, 16),), {}


def random():
    return Net(0.5), (torch.randn(8, 16), torch.randn(8, 16)), {}


def other_on_ranks():
    model, args, kwargs = build()
    if torch.distributed.is_initialized():
        model.body[0].weight.data.mul_(1.01)
    return model, args, kwargs


def fails_on_ranks():
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise RuntimeError("no disk on this rank")
    return build()


def only_a_model():
    return Net()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(FILE)
    return str(path)


def explain(file, *options):
    return main(["explain", f"{file}:build", "--mesh", "dp=2,tp=2", "--cluster", "cpu", *options])


def test_explain_prints_the_plan(file, capsys):
    assert explain(file) == 0
    out, err = capsys.readouterr()
    assert "Plan for mesh dp=2,tp=2 on cluster cpu" in out and "megatron" in out and err == ""


def test_json_is_json(file, capsys):
    assert explain(file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["fqn"] for row in found["inputs"]} >= {"body.0.weight", "body.3.bias"}


def test_code_is_python(file, capsys):
    assert explain(file, "--code", "--hand", "ddp") == 0
    compile(capsys.readouterr().out, "generated", "exec")


def test_hand_plan_and_pin_and_save(file, capsys, tmp_path):
    assert explain(file, "--json", "--hand", "megatron:dp=2,tp=2") == 0
    layouts = {row["fqn"]: row["layout"] for row in json.loads(capsys.readouterr().out)["inputs"]}
    assert layouts["body.0.weight"] == "BS(0)" and layouts["body.3.weight"] == "BS(1)"
    assert explain(file, "--json", "--pin", "body.0.weight=S(1)B", "--save", str(tmp_path / "plan.json")) == 0
    layouts = {row["fqn"]: row["layout"] for row in json.loads(capsys.readouterr().out)["inputs"]}
    assert layouts["body.0.weight"].startswith("S(1)B") and (tmp_path / "plan.json").exists()


def explain_stages(file, *options):
    return main(["explain", f"{file}:deep", "--mesh", "pp=2,dp=2", "--cluster", "cpu", "--microbatches", "4", *options])


def test_explain_prints_stages_their_timeline_and_memory(file, capsys):
    assert explain_stages(file, "--schedule", "1f1b") == 0
    out = capsys.readouterr().out
    assert "Schedule: 1f1b, 2 stages on 2 ranks, 4 microbatches" in out
    assert re.search(r"^rank 0 \|[0-9a-j.]{100}\|$", out, re.MULTILINE) and re.search(
        r"^0 +peak, [0-9.]+ [um]s +2 ", out, re.MULTILINE
    )


def test_stages_as_json_and_trace_and_code(file, capsys, tmp_path):
    assert explain_stages(file, "--schedule", "gpipe", "--json", "--trace", str(tmp_path / "trace.json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"] == {"name": "gpipe", "num_stages": 2, "num_ranks": 2} and found["num_microbatches"] == 4
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event.get("cat") in ("forward", "backward") for event in events) == 2 * 2 * 4
    end_s = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") / 1e6
    assert end_s == pytest.approx(found["step_s"])
    assert explain_stages(file, "--code") == 0
    code = capsys.readouterr().out
    compile(code, "generated", "exec")
    assert code.count("\n# stage ") + code.startswith("# stage 0") == code.count("def forward(")


def test_the_trace_of_a_plan_without_stages_has_forward_backward_and_update(file, tmp_path):
    assert explain(file, "--hand", "ddp", "--trace", str(tmp_path / "trace.json")) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    assert list(dict.fromkeys(event["cat"] for event in timed)) == ["forward", "backward", "update"]
    assert timed[-1]["ts"] > 0 and {"ts", "dur", "tid", "name"} <= timed[0].keys()


def test_a_plan_in_stages_is_written_by_hand(file, capsys):
    assert explain_stages(file, "--hand", "ddp") == 0
    assert "hand plan ddp" in capsys.readouterr().out


def test_microbatches_divide_the_batch(file, capsys):
    assert explain_stages(file, "--microbatches", "3") == 2
    assert "nearest numbers" in capsys.readouterr().err


@pytest.mark.parametrize("hand", [[], ["--hand", "ddp"]], ids=["searched", "by hand"])
def test_the_dtype_of_sums_is_an_option(file, capsys, hand):
    assert explain(file, "--reduce-dtype", "bfloat16", *hand) == 0
    assert "gradients summed in bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory-limit", "1KiB"], "memory"),
        (["--hand", "megatron:dp=3"], "does not fit mesh"),
        (["--why-not", "megatron:dp=1,tp=3"], "possible are"),
        (["--pin", "body.0.weight"], "FQN=LAYOUT"),
        (["--pin", "nowhere=BB"], "nowhere"),
        (["--optimizer", "magic"], "magic"),
    ],
)
def test_what_cannot_be_is_told_without_traceback(file, capsys, options, told):
    assert explain(file, *options) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and told in err and "Traceback" not in err and out == ""


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("gpt5", "built-in"),
        ("{}:nothing", "no function 'nothing'"),
        ("{}:only_a_model", "expected (model, args, kwargs)"),
        ("/nowhere.py:build", "no file"),
    ],
)
def test_bad_targets_are_told(file, capsys, target, told):
    assert main(["explain", target.format(file), "--mesh", "2", "--cluster", "cpu"]) == 2
    assert told in capsys.readouterr().err


def test_bad_cluster_is_told(file, capsys):
    assert main(["explain", f"{file}:build", "--mesh", "2", "--cluster", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--mesh", "2y2"], ["--mesh", "0"], ["--memory-limit", "lots"]])
def test_bad_arguments_are_told(file, capsys, options):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", f"{file}:build", "--cluster", "cpu", "--mesh", "2", *options])
    assert stopped.value.code == 2 and options[-1] in capsys.readouterr().err


def test_sizes():
    assert [parse_bytes(text) for text in ("512", "1.5KiB", "2 GB")] == [512, 1536, 2e9]


def test_differences_are_relative_and_name_the_worst():
    truth = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([100.0]), "zero": torch.tensor([0.0])}
    assert difference(truth, truth)[0] == 0.0
    assert difference(truth | {"a": torch.tensor([1.0, 2.5])}, truth) == (0.25, "a")
    assert difference(truth | {"b": torch.tensor([float("nan")])}, truth)[1] == "b"
    assert difference({}, truth)[0] == float("inf")
    # rounding of a gradient that is zero
    assert difference(truth | {"zero": torch.tensor([1e-8])}, truth)[0] == pytest.approx(1e-6)


@pytest.mark.multirank
def test_verify_as_a_command(file):
    command = [
        sys.executable,
        "-m",
        "autopar",
        "verify",
        f"{file}:build",
        "--mesh",
        "1x2",
        "--hand",
        "megatron",
        "--dtype",
        "float64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    assert re.search(r"forward +a1 +all_reduce +1 +1024 +1 +1024", done.stdout) and "\nequal" in done.stdout


@pytest.mark.multirank
def test_verify_times_the_terms_of_a_step(file, capsys):
    target = ["verify", f"{file}:build", "--mesh", "1x2", "--hand", "megatron", "--time"]
    assert main([*target, "--cluster", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "\nequal" in out and re.search(r"^term +predicted +measured +ratio$", out, re.MULTILINE)
    measured = re.search(r"^all_reduce on a1, forward +[0-9.]+ [mu]s +([0-9.]+) [mu]s +[0-9.]+$", out, re.MULTILINE)
    assert measured and float(measured[1]) > 0
    assert main(target) == 2
    assert "give --cluster" in capsys.readouterr().err


@pytest.mark.multirank
def test_verify_times_the_terms_of_each_rank_of_a_pipeline(file, capsys, tmp_path):
    saved = str(tmp_path / "plan.json")
    assert explain_stages(file, "--save", saved) == 0
    capsys.readouterr()
    target = ["verify", f"{file}:deep", "--mesh", "pp=2,dp=2", "--plan", saved, "--dtype", "float32", "--time"]
    assert main(target) == 0
    out = capsys.readouterr().out
    for rank in (0, 1):
        for term in ("products, forward", "products, backward", "waiting for other stages", "update"):
            name = f"rank {rank} of the pipeline: {term}"
            row = re.search(rf"^{name} +([0-9.]+) [mun]?s +([0-9.]+) [mun]?s +[0-9.]+$", out, re.MULTILINE)
            assert row and float(row[1]) > 0 and float(row[2]) > 0, (name, out)


@pytest.mark.multirank
def test_verify_runs_stages_of_a_saved_plan(file, capsys, tmp_path):
    saved = str(tmp_path / "plan.json")
    assert explain_stages(file, "--save", saved) == 0
    capsys.readouterr()
    assert main(["verify", f"{file}:deep", "--mesh", "pp=2,dp=2", "--plan", saved, "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "\nequal" in out
    sent = re.search(r"^values +([0-9]+ +[0-9]+) +([0-9]+ +[0-9]+)$", out, re.MULTILINE)
    assert sent and sent[1].split() == sent[2].split() and sent[1].split()[0] == "4"


@pytest.mark.multirank
def test_verify_sums_outputs_that_are_no_loss(file, capsys):
    assert main(["verify", f"{file}:without_loss", "--mesh", "2", "--hand", "ddp", "--dtype", "float64"]) == 0
    assert "\nequal" in capsys.readouterr().out


@pytest.mark.multirank
def test_verify_finds_a_difference(file, capsys):
    assert main(["verify", f"{file}:other_on_ranks", "--mesh", "2"]) == 1
    assert "NOT equal" in capsys.readouterr().out


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("function", "told"), [("fails_on_ranks", "rank 1 failed"), ("random", "draws random numbers")]
)
def test_verify_tells_the_first_cause(file, capsys, function, told):
    assert main(["verify", f"{file}:{function}", "--mesh", "2", "--hand", "ddp"]) == 2
    err = capsys.readouterr().err
    assert told in err and ("no disk on this rank" in err or function != "fails_on_ranks")


def test_verify_needs_weights(capsys):
    assert main(["verify", "resnet50", "--mesh", "2"]) == 2
    assert "no weights" in capsys.readouterr().err
