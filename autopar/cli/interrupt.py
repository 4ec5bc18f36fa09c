"""Ctrl-C in commands that make several plans: one ends all of them, and what was made before is printed."""

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeVar

T = TypeVar("T")

STATUS = 130  # of a command that Ctrl-C ended, as of shells


@contextmanager
def giving_up() -> Iterator[None]:
    """A context in which Ctrl-C raises KeyboardInterrupt from `choose_plan` too, which by itself ends the plan at hand
    with the best so far: an answer that compares it with others would be a wrong one, and the next plan would follow.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _give_up)  # a handler that is not Python's own stays in place
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _give_up(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def until_interrupt(items: Iterable[T], what: str) -> tuple[tuple[T, ...], int]:
    """The `items` that are made before Ctrl-C, and the exit status: 0, or `STATUS` after it.

    `what`: the items, in the line on stderr that says how many there are.
    """
    made = list[T]()
    try:
        with giving_up():
            made.extend(items)
    except KeyboardInterrupt:
        print(f"interrupted: {len(made)} {what}", file=sys.stderr)
        return tuple(made), STATUS
    return tuple(made), 0
