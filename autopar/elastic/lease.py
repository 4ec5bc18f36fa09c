"""`Lease`: the right of one group of ranks to write into a folder of checkpoints, so that two jobs do not share one."""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.errors import AutoparError

BEAT_S = 1.0
STALE_S = 10.0  # an owner that gave no sign of life for so long is gone
_LOCK_S = 60.0  # the lock is held while a folder is renamed


class LeaseLost(AutoparError):
    """Another group of ranks has taken the folder; this one must not write into it."""


@dataclass(frozen=True)
class Owner:
    """Who holds a folder. `job`: equal for all generations of a job; `token`: of this generation alone."""

    job: str
    token: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"job {self.job!r}, process {self.pid} on {self.host}"

    @property
    def is_dead(self) -> bool:
        """Whether it is known to have ended, which is known of processes on this host alone."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def job_name() -> str:
    """The rendezvous id of this job; where it has none, its rendezvous' address, or this process."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    if "MASTER_ADDR" in os.environ:
        return f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
    return f"process {os.getpid()} on {socket.gethostname()}"


class Lease:
    """The lease of `folder`, taken by the first rank of a job, and kept by a sign of life each second.

    A generation of the same job takes it over at once: torchrun has ended the one before, or that one is cut off and
    learns of it by LeaseLost. Another job gets it once its owner is dead or silent; AutoparError while it is alive.
    """

    def __init__(self, folder: Path, job: str, *, stale_s: float = STALE_S, beat_s: float = BEAT_S) -> None:
        self.folder, self.beat_s = folder, beat_s
        self.owner = Owner(job, uuid.uuid4().hex, socket.gethostname(), os.getpid())
        self._file, self._ended = folder / "lease.json", threading.Event()
        self._take(stale_s)
        threading.Thread(target=self._beat, daemon=True, name="autopar lease").start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which no other group can take the folder; LeaseLost if one has."""
        with locked(self.folder):
            self.check()
            yield

    def check(self) -> None:
        """LeaseLost if another group has taken the folder."""
        if (other := self._read()) is None or other.token != self.owner.token:
            raise LeaseLost(
                f"{self.folder} was taken by another group of ranks ({other or 'which has ended since'}), which goes on"
                f" from the newest checkpoint: this group ({self.owner}) ends, and what it did since then is dropped"
            )

    def release(self) -> None:
        """Leave the folder to others."""
        self._ended.set()
        with suppress(LeaseLost), self.held():
            self._file.unlink()

    def _take(self, stale_s: float) -> None:
        seen, since_s = None, time.monotonic()
        while True:
            with locked(self.folder):
                other = self._read()
                is_silent = seen is not None and time.monotonic() - since_s >= stale_s
                if other is None or other.job == self.owner.job or other.is_dead or is_silent:
                    return self._write()
                now = (other.token, self._file.stat().st_mtime_ns)
            if seen is not None and now != seen:
                raise AutoparError(
                    f"{self.folder} is in use by another group of ranks ({other}), which is alive; this one is job"
                    f" {self.owner.job!r}. Two jobs cannot train into one folder: end the other one, or give another"
                    " folder"
                )
            seen = now
            time.sleep(min(self.beat_s, stale_s) / 4)

    def _read(self) -> Owner | None:
        try:
            return Owner(**json.loads(self._file.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise AutoparError(f"{self._file} is damaged ({error}); remove it if no job uses the folder") from error

    def _write(self) -> None:
        new = self._file.with_name(f".lease-{self.owner.token}")
        new.write_text(json.dumps(asdict(self.owner)))
        os.replace(new, self._file)

    def _beat(self) -> None:
        while not self._ended.wait(self.beat_s):
            with suppress(OSError, AutoparError):
                self.check()
                os.utime(self._file)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that one process at a time is in, among all that use `folder`; AutoparError after a minute."""
    deadline_s = time.monotonic() + _LOCK_S
    with open(folder / ".lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise AutoparError(f"{folder}/.lock was held by another process for {_LOCK_S:g} s") from None
                time.sleep(0.02)
        yield
