"""`Heartbeat`: a rank ends when another one is cut off from it, instead of waiting for it in a collective."""

import subprocess
import sys
from contextlib import suppress

import torch.distributed as dist

from autopar.elastic import watch_links
from autopar.errors import AutoparError

BEAT_S = 0.5
# A rank that has answered nothing for so long is lost. TCP doubles its wait from 0.2 s on (RFC 6298) and so sends again
# 6.2 s after a link was cut: one that is well by then is not.
SILENT_S = 8.0


class Heartbeat:
    """Messages between the first rank and each other one, by a process of each rank's own (`watch_links.py`).

    A rank that dies closes its connections, so that those that wait for it learn of it; one whose link stalls or is cut
    does not, and torchrun looks at its own processes only. The process ends this rank, with a message, once a message
    of `silent_s` ago has not been answered; its neighbours learn of that by closed connections, and torchrun starts the
    ranks that there are. What a rank computes, or how long, does not matter.

    `store`: where the ranks meet; `place`: a prefix of the keys; `host`: of the first rank; `pid`: of this one.
    AutoparError if no process could be started.
    """

    def __init__(
        self,
        store: dist.Store,
        place: str,
        rank: int,
        num_ranks: int,
        host: str,
        pid: int,
        *,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        key = f"{place}/heartbeat"
        at = [] if rank == 0 else [host, store.get(key).decode()]
        # -I -S: nothing of the user's environment is imported
        command = [sys.executable, "-I", "-S", watch_links.__file__]
        command += [*map(str, (rank, num_ranks, pid, beat_s, silent_s)), *at]
        # a session of its own: Ctrl-C is for the rank
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        if rank == 0:
            assert self._process.stdout is not None, "stdout is a pipe"
            if not (port := self._process.stdout.readline().strip()):
                raise AutoparError(f"the process that watches the ranks' links did not start: {' '.join(command)}")
            store.set(key, port)

    def stop(self) -> None:
        """This rank is done; its end is no loss."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate("done\n", timeout=SILENT_S)
