"""Real torchrun: ranks are killed, disks fill up and checkpoints are damaged, and training ends as if nothing was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.elastic.checkpoints import complete, step_of
from bench.elastic_script import NUM_SAMPLES, undisturbed

ROOT = Path(__file__).parents[2]
STEPS = 24


def torchrun(folder, ranks=2, *more, options=(), status=0, steps=STEPS):
    """What the ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    command += [str(ROOT / "bench" / "elastic_script.py"), str(folder), "--steps", str(steps), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == status, done.stderr[-4000:]
    return done.stdout + done.stderr


def logged(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def check_as_undisturbed(folder, steps=STEPS):
    """What counts is the last time that each step was done; a step that is done again is done on the same samples."""
    last, first = {}, {}
    for line in logged(folder):
        last[line["step"]] = line
        assert first.setdefault(line["step"], line)["rows"] == line["rows"]
    assert sorted(last) == list(range(steps))
    assert [last[step]["loss"] for step in range(steps)] == pytest.approx(undisturbed(steps), rel=1e-9, abs=0)
    each_epoch = -(-NUM_SAMPLES // 12)
    epoch = [row for step in range(each_epoch) for row in last[step]["rows"]]
    assert sorted(epoch) == list(range(NUM_SAMPLES))


@pytest.mark.multirank
def test_ranks_that_are_killed_in_each_phase_and_a_full_disk_change_nothing(tmp_path):
    faults = [
        [3, 1, "forward"],
        [7, 0, "backward"],
        [12, 1, "optimizer"],
        [14, 0, "saving"],
        [19, 1, "full"],
        [29, 1, "writer"],
    ]
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    # time to save
    printed = torchrun(tmp_path, 2, "--pause", "0.2", options=("--max-restarts", "8"), steps=STEPS + 10)
    assert all((tmp_path / f"fault-{index}").exists() for index in range(len(faults)))
    assert "the checkpoint after step 20 was not saved" in printed and "No space left on device" in printed
    assert "the checkpoint after step 30 was not saved" in printed and "ended with status -9" in printed
    check_as_undisturbed(tmp_path, STEPS + 10)
    assert {path.name for path in (tmp_path / "run").iterdir() if path.name.startswith((".saving", "lease"))} == set()


@pytest.mark.multirank
def test_ranks_that_compute_in_bfloat16_go_on_alike(tmp_path):
    """Killed once and then one more, beside ranks that were let alone."""
    once, never = tmp_path / "once", tmp_path / "never"
    once.mkdir(), never.mkdir()
    (once / "faults.json").write_text(json.dumps([[7, 0, "backward"]]))
    dtype = "--param-dtype", "bfloat16"
    torchrun(once, 2, *dtype, options=("--max-restarts", "1"), steps=12)
    torchrun(once, 3, *dtype, steps=16)
    torchrun(never, 2, *dtype, steps=16)
    ended = [{line["step"]: line for line in logged(folder)} for folder in (once, never)]
    losses = [[found[step]["loss"] for step in range(16)] for found in ended]
    assert losses[0][:12] == losses[1][:12] and losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[1] == pytest.approx(undisturbed(16), rel=0.05) and losses[1] != undisturbed(16)
    assert ended[0][15]["ranks"] == 3


@pytest.mark.multirank
def test_other_numbers_of_ranks_go_on_alike_and_a_damaged_checkpoint_is_left_out(tmp_path):
    torchrun(tmp_path, 3, steps=9)
    torchrun(tmp_path, 2, steps=16)
    *_, before, newest = complete(tmp_path / "run")[::-1]  # one that was due while another was written is left out
    assert newest.name == "step-0000000016"
    part = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    printed = torchrun(tmp_path, 1)
    assert f"{newest} is damaged and left out: {part.name} differs from its checksum" in printed
    check_as_undisturbed(tmp_path)
    assert [line["ranks"] for line in logged(tmp_path)] == [3] * 9 + [2] * 7 + [1] * (STEPS - step_of(before))
