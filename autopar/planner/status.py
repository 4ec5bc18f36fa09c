"""`status`: the current stage of planning, shown on a terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from autopar.planner.budget import Progress


@contextmanager
def status(*, after_s: float = 0.0) -> Iterator[Progress]:
    """A context whose value shows a text, the current stage, if stderr is a terminal and `after_s` seconds are over."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    shown, start = console.status(""), time.monotonic()

    def tell(text: str) -> None:
        shown.update(text)
        if time.monotonic() - start >= after_s:
            shown.start()

    try:
        yield tell
    finally:
        shown.stop()
