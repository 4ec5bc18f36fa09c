"""A process beside each rank that ends it once its link is cut, or stalls; `Heartbeat` starts it.

    watch_links.py RANK NUM_RANKS PID BEAT_S SILENT_S [HOST PORT]

It is run by its path and imports nothing but the standard library, so that it is there within a tenth of a second, and
beats while the rank holds Python's lock. That of the first rank listens at a port, which it prints; all others talk to
it alone, by TCP: each side sends a message each `BEAT_S`, and gives back the newest time it was sent. If the newest
message that the other side has answered was sent more than `SILENT_S` ago, the process `PID` is killed: bytes that
trickle through a queue do not count as a sign of life, but those that come in time. A line on standard input says that
the rank is done, its end that the rank has ended; neither is a loss of the link, nor is a connection that is closed.
"""

import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

# Rank, whether it is done, its time, and the newest time of the other side. A message is as long as a packet, so that
# a link that does not carry a packet each beat is none.
_MESSAGE = struct.Struct("!i?dd")
_BYTES = 1024


@dataclass(eq=False)
class Link:
    """A connection; `rank` at its other end, -1 until that is told."""

    connection: socket.socket
    rank: int
    answered_s: float = field(default_factory=time.monotonic)  # when the newest message that was answered was sent
    newest: float = 0.0  # the other side's
    is_done: bool = False
    unsent: bytes = b""
    unread: bytes = b""

    def send(self, rank: int, is_done: bool) -> None:
        """Send a message, unless there is no room behind those before it."""
        if not self.unsent or is_done:
            message = _MESSAGE.pack(rank, is_done, time.monotonic(), self.newest)
            self.unsent += message.ljust(_BYTES, b"\0")
        with suppress(BlockingIOError):
            self.unsent = self.unsent[self.connection.send(self.unsent) :]

    def receive(self) -> None:
        """Read the messages that have come; ConnectionError once it is closed."""
        if not (more := self.connection.recv(64 * _BYTES)):
            raise ConnectionError("closed")
        self.unread += more
        while len(self.unread) >= _BYTES:
            self.rank, self.is_done, self.newest, answered_s = _MESSAGE.unpack_from(self.unread)
            self.unread = self.unread[_BYTES:]
            self.answered_s = max(self.answered_s, answered_s)


class Watch:
    """The links of one rank: of the first one to all others, of those to the first."""

    def __init__(self, rank: int, num_ranks: int, beat_s: float, silent_s: float) -> None:
        self.rank, self.num_ranks, self.beat_s, self.silent_s = rank, num_ranks, beat_s, silent_s
        self.links: list[Link] = []
        self.missing = set(range(1, num_ranks)) if rank == 0 else {0}  # have not come yet
        self.start_s = time.monotonic()
        self.events = selectors.DefaultSelector()
        self.events.register(sys.stdin, selectors.EVENT_READ)

    def listen(self) -> int:
        """Expect the others; the port."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, backlog=self.num_ranks, dualstack_ipv6=both)
        self.events.register(self.listener, selectors.EVENT_READ)
        return self.listener.getsockname()[1]

    def connect(self, host: str, port: int) -> None:
        """Reach the first rank; what fails is tried again until it is lost."""
        try:
            self._add(socket.create_connection((host, port), timeout=self.silent_s))
        except OSError:
            time.sleep(self.beat_s)

    def lost(self) -> int | None:
        """A rank that has not answered in time; None if all have."""
        now = time.monotonic()
        if self.missing and now - self.start_s > self.silent_s:
            return min(self.missing)
        return next((link.rank for link in self.links if now - link.answered_s > self.silent_s), None)

    def beat(self, *, is_done: bool = False) -> None:
        """Send a message on each link."""
        for link in [*self.links]:
            self._try(link, partial(link.send, self.rank, is_done))

    def wait(self) -> str | None:
        """Read what comes until the next beat; what standard input said, if it did: a line or, at its end, nothing."""
        until = time.monotonic() + self.beat_s
        while (left := until - time.monotonic()) > 0:
            for key, _ in self.events.select(left):
                if key.fileobj is sys.stdin:
                    return sys.stdin.readline()
                if key.data is None:
                    self._add(self.listener.accept()[0])
                else:
                    self._try(key.data, key.data.receive)
        return None

    def _add(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        link = Link(connection, -1)
        self.links.append(link)
        self.events.register(connection, selectors.EVENT_READ, link)

    def _try(self, link: Link, work: Callable[[], None]) -> None:
        """Send or receive; a link whose other side has ended or is done is watched no longer."""
        try:
            work()
            self.missing.discard(link.rank)
            is_over = link.is_done
        except BlockingIOError:
            is_over = False
        except OSError:
            is_over = True
        if is_over:
            self.missing.discard(link.rank)
            self.links.remove(link)
            self.events.unregister(link.connection)
            link.connection.close()


def main(rank: int, num_ranks: int, pid: int, beat_s: float, silent_s: float, *place: str) -> None:
    """Watch the links of a rank until it, or the other side, is done or lost."""
    watch = Watch(rank, num_ranks, beat_s, silent_s)
    if rank == 0:
        print(watch.listen(), flush=True)
    while watch.missing or watch.links:
        if place and watch.missing and not watch.links:
            watch.connect(place[0], int(place[1]))
        watch.beat()
        if (said := watch.wait()) is not None:
            if said:
                watch.beat(is_done=True)
            return
        if (other := watch.lost()) is not None:
            print(
                f"autopar: rank {rank} has had no answer of rank {other} for {silent_s:g} s: it, or this one, is cut"
                " off; this process ends, so that training goes on without the one that is",
                file=sys.stderr,
                flush=True,
            )
            os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    own_rank, ranks, own_pid, beat, silent, *at = sys.argv[1:]
    main(int(own_rank), int(ranks), int(own_pid), float(beat), float(silent), *at)
