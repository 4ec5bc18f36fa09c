"""A core of one's own for a few steps, and a neighbour that takes a part of it.

    python bench/own_core.py CORE FACTOR   # the neighbour: "1" on its input starts it, "0" pauses it, the end ends it

What else a machine does falls on ranks by chance, and of several ranks the slowest counts. So a rank that is measured
has real-time priority (SCHED_FIFO) for a step or two, where the system allows it, and then lets others run. A core that
is FACTOR times slower is one that a neighbour of yet higher priority takes all but 1 / FACTOR of, in turns of a few
milliseconds: all threads of the rank are slower alike, forward, backward and collectives.
"""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TURN_S = 0.004  # in which a neighbour computes once
PAUSE_S = 0.25  # after steps at real-time priority, so that others run
MAIN, NEIGHBOUR, OTHERS = 1, 2, 3  # priorities: threads of collectives sleep most of the time, and are let in at once


class Neighbour:
    """A process on a core, which computes while it is `on`."""

    def __init__(self, core: int, factor: float) -> None:
        command = [sys.executable, str(Path(__file__)), str(core), str(factor)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)

    @contextmanager
    def on(self) -> Iterator[None]:
        """The core is slower within."""
        self._tell(b"1")
        try:
            yield
        finally:
            self._tell(b"0")

    def close(self) -> None:
        assert self._process.stdin is not None, "its input is a pipe"
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, word: bytes) -> None:
        assert self._process.stdin is not None, "its input is a pipe"
        self._process.stdin.write(word)


@contextmanager
def own_core() -> Iterator[None]:
    """All threads of this process run before those of others within, where the system allows it."""
    main = threading.get_native_id()
    _set_policy({int(one): MAIN if int(one) == main else OTHERS for one in os.listdir("/proc/self/task")})
    try:
        yield
    finally:
        _set_policy({int(one): 0 for one in os.listdir("/proc/self/task")})


def waited_for_core_s() -> float:
    """Seconds that this thread was ready to run while its core had something else to do."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9


def _set_policy(priorities: dict[int, int]) -> None:
    """Give threads real-time priorities; 0: none."""
    for thread, priority in priorities.items():
        with suppress(PermissionError, ProcessLookupError):
            policy = os.SCHED_FIFO if priority else os.SCHED_OTHER
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


def neighbour(core: int, factor: float) -> None:
    """Compute in turns, as the input says."""
    os.sched_setaffinity(0, {core})
    _set_policy({os.getpid(): NEIGHBOUR})
    busy_s, is_on = TURN_S * (1 - 1 / factor), False
    while True:
        if select.select([0], [], [], TURN_S - busy_s if is_on else None)[0]:
            word = os.read(0, 1)
            if not word:
                return
            is_on = word == b"1"
        elif is_on:
            until_s = time.perf_counter() + busy_s
            while time.perf_counter() < until_s:
                pass


if __name__ == "__main__":
    neighbour(int(sys.argv[1]), float(sys.argv[2]))
