"""Ranks that are cut off from one another, or whose link stalls, end; one that is done is not missed."""

import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore

from autopar.elastic.heartbeat import Heartbeat

BEAT_S, SILENT_S = 0.05, 4.0  # much longer than a process waits for a core while other tests run
BYTES = 1024  # of a message


class Link:
    """A connection from a rank to the port of the first one, until it is spoilt: then `passes(bytes)` says how many of
    those that wait go on each tenth of a second.
    """

    def __init__(self, port: int) -> None:
        self.passes: Callable[[int], int] | None = None
        self.server, self.port = socket.create_server(("localhost", 0)), port
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        one = self.server.accept()[0]
        other = socket.create_connection(("localhost", self.port))
        to, waiting = {one: other, other: one}, {one: b"", other: b""}
        events = selectors.DefaultSelector()
        for end in to:
            events.register(end, selectors.EVENT_READ)
        while True:
            for key, _ in events.select(0.1):
                if not (read := key.fileobj.recv(2**16)):
                    return [end.close() for end in to]
                waiting[key.fileobj] += read
            for end, left in waiting.items():
                count = len(left) if self.passes is None else self.passes(len(left))
                to[end].sendall(left[:count])
                waiting[end] = left[count:]
            if self.passes is not None:
                time.sleep(0.1)


class Rank:
    """A process that does nothing, its heartbeat, and its link to the first rank."""

    def __init__(self, store: HashStore, rank: int, num_ranks: int) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        if rank:
            self.link = Link(int(store.get("g/heartbeat")))
            own = HashStore()
            own.set("g/heartbeat", str(self.link.server.getsockname()[1]))
            store = own
        options = {"beat_s": BEAT_S, "silent_s": SILENT_S}
        self.alive = Heartbeat(store, "g", rank, num_ranks, "localhost", self.process.pid, **options)

    @property
    def is_killed(self) -> bool:
        return self.process.poll() == -signal.SIGKILL


@contextmanager
def ranks_of_three() -> Iterator[list[Rank]]:
    store = HashStore()
    started = [Rank(store, rank, 3) for rank in range(3)]
    time.sleep(SILENT_S / 4)
    assert not any(rank.is_killed for rank in started)
    yield started
    for rank in started:
        if rank.alive._process.poll() is None:
            rank.alive.stop()
        rank.process.kill()
        rank.process.wait()


def wait_for_ends(*ranks: Rank) -> None:
    """Wait until these are killed, for several times as long as that should take."""
    until = time.monotonic() + 5 * SILENT_S
    while not all(rank.is_killed for rank in ranks):
        assert time.monotonic() < until, "no rank but those that were killed had ended"
        time.sleep(BEAT_S)


def test_a_rank_that_is_cut_off_and_the_first_one_end(capfd: pytest.CaptureFixture) -> None:
    with ranks_of_three() as ranks:
        ranks[2].link.passes = lambda waiting: 0
        wait_for_ends(ranks[0], ranks[2])
        assert not ranks[1].is_killed
        told = capfd.readouterr().err
        assert (
            f"rank 0 has had no answer of rank 2 for {SILENT_S:g} s" in told
            and "rank 2 has had no answer of rank 0" in told
        )


def test_a_link_that_lets_some_bytes_through_is_none() -> None:
    with ranks_of_three() as ranks:
        ranks[1].link.passes = lambda waiting: min(waiting, BYTES // 20)  # half a message a second, of twenty
        wait_for_ends(ranks[0], ranks[1])
        assert not ranks[2].is_killed


def test_a_link_that_is_well_again_in_time_is_no_loss() -> None:
    with ranks_of_three() as ranks:
        ranks[2].link.passes = lambda waiting: 0
        time.sleep(SILENT_S / 4)
        ranks[2].link.passes = None
        time.sleep(1.25 * SILENT_S)
        assert not any(rank.is_killed for rank in ranks)


def test_ranks_that_are_done_or_have_ended_are_not_missed() -> None:
    with ranks_of_three() as ranks:
        ranks[1].alive.stop()
        os.kill(ranks[2].alive._process.pid, signal.SIGKILL)  # as its rank's end does by the end of the pipe
        time.sleep(1.25 * SILENT_S)
        assert not any(rank.is_killed for rank in ranks)
