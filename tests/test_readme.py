"""The README's claims that running its blocks (tests/pages) does not show."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.pages.blocks import GIVEN, ROOT, blocks_of
from tests.workers import Ranks, device_mesh


def losses_outside(block: str) -> bool:
    """Whether the mean of the ranks' losses, each of its own rows, is that of the whole batch."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    names = {"mesh": mesh, "x": torch.randn(32, 64), "torch": torch, "autopar": autopar}
    exec((GIVEN / "readme_losses.py").read_text(), names)
    losses = []
    for part in block.split("\n\n"):
        torch.manual_seed(0)
        own = dict(names)
        exec(part, own)
        losses.append(own["loss"].detach())
    dist.all_reduce(losses[1])
    return bool((losses[0] - losses[1] / 4).abs() < 1e-5)


@pytest.mark.multirank
def test_a_loss_outside_of_the_model_is_that_of_one_device(ranks4: Ranks) -> None:
    (block,) = (block.text for block in blocks_of("README.md") if "my_labels" in block.text)
    assert ranks4.run(losses_outside, block) == [True] * 4


def test_the_demo_trains_like_one_process_and_moves_the_planned_bytes() -> None:
    shown = subprocess.run(
        [sys.executable, str(Path(ROOT) / "examples" / "train_gpt.py"), "--steps", "2"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stdout[-3000:] + shown.stderr[-3000:]
    assert shown.stdout.endswith("planned and counted on every rank: equal\n")
