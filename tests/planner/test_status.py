"""What a terminal shows of planning."""

import io

import pytest
from rich.console import Console

from autopar.planner import status as module
from autopar.planner.status import status


def shown(monkeypatch: pytest.MonkeyPatch, after_s: float, *, is_terminal: bool = True) -> str:
    """The text on a terminal of a stage that is told of."""
    text = io.StringIO()
    monkeypatch.setattr(module, "Console", lambda **_: Console(file=text, force_terminal=is_terminal))
    with status(after_s=after_s) as tell:
        tell("search")
        tell("peak")
    return text.getvalue()


def test_a_terminal_shows_the_present_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "peak" in shown(monkeypatch, 0.0)


def test_short_planning_and_files_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 60.0) == "" == shown(monkeypatch, 0.0, is_terminal=False)
