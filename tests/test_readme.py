"""What the README shows runs."""

import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.workers import Ranks, device_mesh

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run_blocks(blocks: list[str], folder: str) -> bool:
    """On a rank whose process group is up already: the training loop, then planning ahead for the same model."""
    torch.manual_seed(dist.get_rank())  # nobody seeds the ranks alike before they build the model
    names: dict = {}
    exec(blocks[0].replace('dist.init_process_group("gloo")', "pass"), names)
    assert isinstance(names["mesh"], DeviceMesh)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    ahead = {"autopar": names["autopar"], "model": model, "x": names["x"], "mesh": device_mesh((2, 2), ("dp", "tp"))}
    with contextlib.chdir(folder):
        exec(blocks[1], ahead)
    assert torch.isfinite(ahead["model"](names["x"]).sum())
    return losses_outside(blocks[2], names)


def losses_outside(block: str, names: dict) -> bool:
    """Whether the mean of the ranks' losses, each of its own rows, is that of the whole batch."""
    rows = slice(16 * names["mesh"].get_local_rank("dp"), None)
    given = {"my_x": names["x"][rows][:16], "labels": torch.arange(32), "my_labels": torch.arange(32)[rows][:16]}
    losses = []
    for part in block.split("\n\n"):
        torch.manual_seed(0)
        own = {**names, **given}
        exec(part, own)
        losses.append(own["loss"].detach())
    dist.all_reduce(losses[1])
    return bool((losses[0] - losses[1] / 4).abs() < 1e-5)


@pytest.mark.multirank
def test_examples_run(ranks4: Ranks) -> None:
    blocks = python_blocks()
    assert len(blocks) == 3
    with tempfile.TemporaryDirectory() as folder:
        assert ranks4.run(run_blocks, blocks, folder) == [True] * 4


def test_the_demo_trains_like_one_process_and_moves_the_planned_bytes() -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--steps", "2"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stdout[-3000:] + shown.stderr[-3000:]
    assert shown.stdout.endswith("planned and counted on every rank: equal\n")
