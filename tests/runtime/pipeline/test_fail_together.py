"""A stage that raises or dies ends all ranks soon, and each says the first cause."""

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.pipeline.fail_together import EXIT_CODE, Meeting, failing_together
from autopar.schedule.orders import Schedule
from tests.runtime.pipeline.test_run_schedule import build, pipeline
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank

SOON_S = 10.0
FAILING = 2  # its stage is neither the first nor the last


class Strikes(torch.autograd.Function):
    """Does nothing, and in its backward what it was given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strike: Callable[[], None]) -> torch.Tensor:
        ctx.strike = strike
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.strike()
        return gradient, None


def bad_luck() -> None:
    raise ValueError("no luck today")


def death() -> None:
    os._exit(3)


def step_with(strike: Callable[[], None], when: str, name: str, is_patient: bool, folder: str) -> None:
    """One good step and one in which the third microbatch strikes rank 2. Ranks that raise write what; a patient rank
    then lives on.
    """
    path = Path(folder) / str(dist.get_rank())
    os.dup2(os.open(path.with_suffix(".err"), os.O_CREAT | os.O_WRONLY), 2)
    mesh = device_mesh((4,), ("pp",))
    model, ids = build(8)
    meeting = Meeting("autopar/test", range(4))
    schedule = Schedule(name, 4, 4, 6)
    runner, works = pipeline(model, ids, (2, 3, 4), mesh, schedule)
    runner.step(works)
    if dist.get_rank() == FAILING:
        _let_strike(works, strike, when)
    start = time.monotonic()
    try:
        with failing_together(meeting):
            runner.step(works)
    except Exception as error:
        path.write_text(f"{time.monotonic() - start}\n{type(error).__name__}\n{error}")
        if is_patient:
            with pytest.raises(AutoparError, match="failed before"), failing_together(meeting):
                runner.step(works)
            time.sleep(30)
    os._exit(0)


def _let_strike(works: dict, strike: Callable[[], None], when: str) -> None:
    (index,) = works
    original = works[index]

    def body(microbatch: int, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if microbatch == 2 and when == "forward":
            strike()
        found = original(microbatch, values)
        return (Strikes.apply(found[0], strike if microbatch == 2 else int), *found[1:])

    works[index] = body


def met(
    folder: Path, strike: Callable[[], None], when: str, name: str, is_patient: bool
) -> dict[int, tuple[float, str, str]]:
    """Per rank: seconds until it ended or raised, the error's class ("exit": the process was ended), what it said."""
    ranks = Ranks(4)
    try:
        ranks.run(int)
        start, found = time.monotonic(), {}
        for connection in ranks._connections:  # not by `run`, which ends all once one has died
            connection.send_bytes(pickle.dumps((step_with, (strike, when, name, is_patient, str(folder)))))
        while len(found) < 4 and time.monotonic() < start + 30:
            time.sleep(0.05)
            for rank, process in enumerate(ranks._processes):
                path = folder / str(rank)
                if rank not in found and path.exists() and path.read_text().count("\n") >= 2:
                    seconds, kind, text = path.read_text().split("\n", 2)
                    found[rank] = float(seconds), kind, text
                elif rank not in found and process.exitcode is not None and not path.exists():
                    said = path.with_suffix(".err").read_text()
                    found[rank] = time.monotonic() - start, f"exit {process.exitcode}", said
        return found
    finally:
        ranks.stop()


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_stage_that_raises_ends_all_ranks(tmp_path, when, name):
    found = met(tmp_path, bad_luck, when, name, is_patient=False)
    assert found.keys() == set(range(4))
    assert found[FAILING][1:] == ("ValueError", "no luck today")
    for rank, (seconds, kind, text) in found.items():
        assert seconds < SOON_S, (rank, seconds)
        if rank != FAILING:
            assert kind == "PeerFailed" and f"rank {FAILING} failed first, ValueError: no luck today" in text, (
                rank,
                kind,
                text,
            )


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_stage_that_raises_and_lives_on_ends_all_ranks(tmp_path, when):
    found = met(tmp_path, bad_luck, when, "1f1b", is_patient=True)
    assert found.keys() == set(range(4))
    assert found[FAILING][1:] == ("ValueError", "no luck today")
    for rank, (_, kind, text) in found.items():
        if rank != FAILING:
            assert kind in ("PeerFailed", f"exit {EXIT_CODE}"), (rank, kind, text)
            assert f"rank {FAILING} failed first, ValueError: no luck today" in text, (rank, kind, text)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_stage_that_dies_ends_all_ranks(tmp_path, when):
    found = met(tmp_path, death, when, "1f1b", is_patient=False)
    assert found.pop(FAILING)[1] == "exit 3"
    assert found.keys() == {0, 1, 3}
    for rank, (seconds, kind, text) in found.items():
        assert seconds < SOON_S, (rank, seconds)
        assert kind == "PeerFailed" and f"rank {FAILING} died" in text, (rank, kind, text)
