"""What a run of `bench/elastic_script.py` has written, beside a run of one process that nothing disturbs."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.elastic_script import NUM_SAMPLES, undisturbed
from bench.papers.section import table
from bench.report import Row

ROOT = Path(__file__).parents[1]
MOST_S = 1800.0  # a run that takes longer hangs
# How soon the agents of torchrun notice that one is gone, and how long they wait for more.
RENDEZVOUS = "is_host=false,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3"
WHOLE = table(
    "Whole runs",
    ("row", "steps", "done again", "samples lost or repeated", "loss differs at most, relative", "seconds"),
    ("killed ranks", "ranks that leave and join", "stalled link", "partition that heals"),
)


def wait_for(folder: Path, step: int, num_ranks: int, again: Callable[[], None]) -> int:
    """The newest step that so many ranks have done, once it is at least `step`.

    `again`: starts agents anew that have ended with an error meanwhile, as a job manager does.
    """
    deadline = time.monotonic() + MOST_S
    while time.monotonic() < deadline:
        done = [line["step"] for line in lines_of(folder) if line["ranks"] == num_ranks]
        if done and done[-1] >= step:
            return done[-1]
        again()
        time.sleep(0.05)
    raise RuntimeError(f"{num_ranks} ranks did not come to step {step}: {tail(folder)}")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """A line for each step that was done."""
    file = folder / "log.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


def tail(folder: Path) -> str:
    """The last of what the ranks printed."""
    return (folder / "printed").read_text()[-3000:]


def resumed(lines: Sequence[dict[str, Any]], at: float, num_ranks: int | None = None) -> Row:
    """The first step that was done by new ranks after the time `at`; `num_ranks`: by so many."""
    before = [line for line in lines if line["at"] <= at]
    later = [line for line in lines if line["at"] > at and line["start"] > at]
    first = next(line for line in later if num_ranks in (None, line["ranks"]))
    assert before, "a rank died before the first step"
    return {"resumed at": first["step"], "resumed after, s": first["at"] - at}


def whole(name: str, lines: Sequence[dict[str, Any]], num_steps: int, seconds: float) -> Row:
    """What was done last of each step, beside a run of one process that nothing disturbs."""
    last = {line["step"]: line for line in lines}
    expected = undisturbed(num_steps)
    if sorted(last) != list(range(num_steps)):
        raise RuntimeError(f"{name}: steps {sorted(set(range(num_steps)) - set(last))} were not done")
    rows = [row for step in range(num_steps) for row in last[step]["rows"]]
    whole_epochs = len(rows) // NUM_SAMPLES * NUM_SAMPLES
    counts = [rows[:whole_epochs].count(sample) for sample in range(NUM_SAMPLES)]
    wrong = sum(abs(count - whole_epochs // NUM_SAMPLES) for count in counts)
    differs = max(abs(last[step]["loss"] - loss) / abs(loss) for step, loss in enumerate(expected))
    again = len(lines) - num_steps
    return dict(zip(WHOLE.header, (name, num_steps, again, wrong, differs, seconds)))
