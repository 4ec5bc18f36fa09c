"""Threads that talk to the store, all ended before the interpreter is.

A thread that is inside a call of torch when the interpreter ends is unwound there, which aborts the process (SIGABRT,
"terminate called without an active exception") after a script that did all it should.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

END_S = 10.0

_ends = threading.Event()
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start(target: Callable[..., None], *args: Any, name: str) -> None:
    """Run `target` in a thread of its own, which returns soon once `ends_within` says so, or by itself."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def ends_within(seconds: float) -> bool:
    """Whether the interpreter is about to end, after waiting for that for `seconds` at most."""
    return _ends.wait(seconds)


@atexit.register
def _end() -> None:
    _ends.set()
    for thread in list(_threads):
        thread.join(END_S)
