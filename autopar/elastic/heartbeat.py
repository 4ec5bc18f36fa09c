"""`Heartbeat`: a rank ends when another one is cut off from it, instead of waiting for it in a collective."""

import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

BEAT_S = 1.0
SILENT_S = 15.0  # a rank that gave no sign of life for so long is lost
_ENDED = "ended"


class Heartbeat:
    """A sign of life of this rank each second in the ranks' store, and a look at that of the next rank.

    A rank that dies closes its connections, so that those that wait for it learn of it; one whose link stalls or is cut
    does not, and torchrun looks at its own processes only. After `silent_s` without a sign of the next rank, or an
    answer of the store, `lost` is called with the reason; it ends this process, by which its neighbours learn of it
    too, and torchrun starts the ranks that there are. It is a matter of each rank and the next one, whatever their
    number. What a rank computes, or how long, does not matter: the signs come from a thread.

    `connect`: a connection to the store that nothing else uses, for a wait holds it; `place`: a prefix of the keys.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        place: str,
        rank: int,
        num_ranks: int,
        *,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self.connect, self.beat_s, self.silent_s, self.lost = connect, beat_s, silent_s, lost or _end_process
        self.next_rank = (rank + 1) % num_ranks
        self._own, self._next = (f"{place}/alive/{one}" for one in (rank, self.next_rank))
        self._rank, self._ended, self._seen_s = rank, threading.Event(), time.monotonic()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._watch)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """This rank is done; its end is no loss."""
        self._ended.set()
        for thread in self._threads:
            thread.join(2 * self.beat_s)

    def _beat(self) -> None:
        """Give and look for signs of life; what fails is tried again, for the store may be what is cut off."""
        store, count, seen = None, 0, ""
        while not self._ended.wait(self.beat_s):
            try:
                store = store or self.connect()
                store.set(self._own, str(count := count + 1))
                found = store.get(self._next).decode() if store.check([self._next]) else ""
            except RuntimeError:  # all of torch's errors of stores are some
                continue
            if found == _ENDED:
                self._ended.set()
            if found != seen:
                seen, self._seen_s = found, time.monotonic()
        try:
            if store is not None:
                store.set(self._own, _ENDED)
        except RuntimeError:  # the store has ended before
            pass

    def _watch(self) -> None:
        """Beside the thread that beats, which may wait for the store."""
        while not self._ended.wait(self.beat_s):
            silent_s = time.monotonic() - self._seen_s
            if silent_s > self.silent_s:
                self._ended.set()
                self.lost(
                    f"rank {self._rank} has seen no sign of life of rank {self.next_rank} for {silent_s:.0f} s: it, or"
                    " this one, is cut off; this process ends, so that training goes on without the one that is"
                )


def _end_process(reason: str) -> None:
    """At once: the thread that trains may wait in a collective, where no exception reaches it."""
    print(f"autopar: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
