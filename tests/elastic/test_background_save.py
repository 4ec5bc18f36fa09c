"""The thread that saves gives way to the one that trains."""

import os
import sys
import threading

import pytest

from autopar.elastic.background_save import _giving_way


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux alone")
def test_a_thread_that_saves_has_low_priority_and_keeps_the_lock_for_less_time() -> None:
    usual, seen = sys.getswitchinterval(), []

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def save() -> None:
        with _giving_way():
            seen.append((priority(), sys.getswitchinterval()))

    own = priority()
    (thread := threading.Thread(target=save)).start()
    thread.join()
    assert seen[0][0] > own and seen[0][1] < usual / 10
    assert (priority(), sys.getswitchinterval()) == (own, usual)
