"""One Ctrl-C ends commands that make several plans; what is printed then is what was found before."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.cli.interrupt import STATUS, giving_up, until_interrupt
from autopar.mesh import parse_devices
from autopar.planner.choose import choose_plan
from tests.answers.asked_plans import CLUSTER, graph

FILE = """
import multiprocessing, time, torch
from tests.answers.asked_plans import Deep

def build(batch=64):
    if batch == 128 and multiprocessing.parent_process():  # in a worker of sweep
        time.sleep(600)
    with torch.device("meta"):
        return Deep(), (torch.zeros(batch, 256), torch.zeros(batch, 64)), {}
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(FILE)
    return f"{tmp_path}/net.py:build"


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own; a shell that runs tests in the background has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def strike(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_what_was_made_before_ctrl_c_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        strike()
        yield 3

    assert until_interrupt(items(), "items were made") == ((1, 2), STATUS)
    assert capsys.readouterr().err == "interrupted: 2 items were made\n"
    assert until_interrupt(iter("ab"), "items were made") == (("a", "b"), 0)


def test_a_plan_among_several_is_given_up() -> None:
    """Where `choose_plan` by itself would end with the best plan so far."""
    mesh = parse_devices("2x2")
    assert choose_plan(graph(), mesh, CLUSTER, progress=_once("price")).found_by.endswith("ended by Ctrl-C")
    with pytest.raises(KeyboardInterrupt), giving_up():
        choose_plan(graph(), mesh, CLUSTER, progress=_once("price"))


def _once(stage: str = "") -> Any:
    """Strikes at the first report of `stage`, by default of anything."""
    struck = list[str]()

    def tell(text: str) -> None:
        if stage in text and not struck:
            struck.append(text)
            strike()

    return tell


def _planner(made: list[Any], stage_of: int) -> Any:
    """`choose_plan`, which adds its plans to `made`, and during the one of that number Ctrl-C comes."""

    def plan(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        if len(made) == stage_of:
            kwargs["progress"] = _once()
        return choose_plan(*args, **kwargs)

    return plan


def test_questions_after_ctrl_c_are_not_answered(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list[Any]()
    monkeypatch.setattr(sys.modules["autopar.cli.main"], "choose_plan", _planner(made, 2))  # two questions'
    weights = [item.fqn for item in graph().of_kind("parameter")]
    questions = ["--why", "memory", "--why", weights[0], "--why", weights[1]]
    assert main(["explain", target, "--mesh", "2x2", "--cluster", "h100", *questions]) == STATUS
    found = capsys.readouterr()
    assert len(made) == 2 and found.err == "interrupted: 1 questions were answered\n"
    assert "What does the memory limit" in found.out and f"Why {weights[0]}" not in found.out


def test_no_change_is_taken_for_one_that_does_not_fit(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list[Any]()
    monkeypatch.setattr("autopar.cli.fit_command.choose_plan", _planner(made, 3))
    assert main(["fit", target, "--mesh", "2x2", "--cluster", "h100", "--memory-limit", "20kB"]) == STATUS
    assert len(made) == 3 and capsys.readouterr().err == "interrupted: 0 changes were tried\n"


def test_a_sweep_ends_in_the_middle_of_a_point(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    struck_s = list[float]()

    @contextmanager
    def status() -> Iterator[Any]:
        def tell(text: str) -> None:
            if text == "1 of 2 points":
                struck_s.append(time.monotonic())
                strike()

        yield tell

    monkeypatch.setattr("autopar.cli.sweep_command.status", status)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})  # two workers on any machine
    other = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,), daemon=True)
    other.start()  # a process of the caller, which is no worker
    assert main(["sweep", target, "--cluster", "h100", "--devices", "2", "--batch", "64,128"]) == STATUS
    assert time.monotonic() - struck_s[0] < 60  # of the 600 s of the second point
    found = capsys.readouterr()
    assert found.err.endswith("points were planned\n") and "128" not in found.out
    other.join(1.0)
    assert other.is_alive()
    other.kill()
