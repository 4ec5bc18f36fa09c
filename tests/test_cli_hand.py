"""`--hand` with files: functions of torch's own parallelism, and DeepSpeed's configuration."""

import json
import re

import pytest

from autopar.cli import main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return self.down(self.up(x).relu()).sum()

def build():
    return Net(), (torch.ones(8, 32),), {}
"""
PLANS = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def split(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])

def fails(model, mesh):
    model.no_such_layer
"""
ARGS = ("--mesh", "dp=2,tp=2", "--cluster", "cpu")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "plans_by_hand.py").write_text(PLANS)
    (tmp_path / "broken.py").write_text("def f(:\n    pass\n")
    (tmp_path / "import_fails.py").write_text("x = 1\nraise RuntimeError('not today')\n")
    config = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": 8}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    return tmp_path


def explained(capsys, files, *words: str) -> str:
    assert main(["explain", f"{files}/net.py:build", *ARGS, *words]) == 0
    return capsys.readouterr().out


def test_a_function_is_priced_and_its_layouts_shown(files, capsys):
    text = explained(capsys, files, "--hand", f"{files}/plans_by_hand.py:split")
    assert "plans_by_hand.py:split; no lower bound" in text
    assert "(_StridedShard(dim=0, sf=2), Shard(dim=0)) on dp, tp" in text and "(Shard(dim=0), Shard(dim=1))" in text
    found = json.loads(explained(capsys, files, "--hand", f"{files}/plans_by_hand.py:split", "--json"))
    rows = {row["fqn"]: row for row in found["by_hand"]["parameters"]}
    assert rows["down.weight"]["priced"] == "S(0)S(1)"


def test_a_function_beside_the_plan_that_is_found(files, capsys):
    text = explained(capsys, files, "--why-not", f"{files}/plans_by_hand.py:split", "--why-not", f"{files}/ds.json")
    assert "Why not" in text and "plans_by_hand.py:split" in text and "ds.json" in text


def test_deepspeed(files, capsys):
    text = explained(capsys, files, "--hand", f"{files}/ds.json")
    assert "ds.json (zero1)" in text and "Optimizer state of 4 parameters" in text
    assert "Bucket sizes of zero_optimization are not read" in text


@pytest.mark.parametrize(
    ("hand", "words"),
    [
        ("plans_by_hand.py:fails", r"plans_by_hand.py:10: `model.no_such_layer` raised AttributeError"),
        ("plans_by_hand.py:none", "has no function 'none'; write --hand path.py:function"),
        ("plans_by_hand.py", "write --hand path.py:function"),
        ("none.py:f", "no file .*none.py"),
        ("none.json", "none.json: No such file"),
        ("broken.py:f", r"broken.py:1: "),
        ("import_fails.py:f", r"import_fails.py:2: .*not today"),
    ],
)
def test_files_that_are_no_plan(files, capsys, hand, words):
    assert main(["explain", f"{files}/net.py:build", *ARGS, "--hand", f"{files}/{hand}"]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error), error
    assert error.startswith("error: ")
