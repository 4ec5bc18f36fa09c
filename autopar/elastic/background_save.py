"""`BackgroundSave`: checkpoints written beside training, each of them complete or none."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from autopar.elastic.checkpoints import DamagedCheckpoint, Manifest, commit, drop_older, fingerprint_file, partial_path
from autopar.elastic.lease import Lease, LeaseLost
from autopar.elastic.run_state import RunState, save_others, without_values
from autopar.elastic.state_copy import StateCopy
from autopar.errors import AutoparError, warn

_SWITCH_S, _NICE = 5e-5, 10


class BackgroundSave:
    """Saves into `folder`, one at a time; every rank calls it alike. `lease`: on the first rank.

    `start` copies the state into memory that is kept for that, which is all that delays a step; a thread writes it,
    reads it back, and the first rank makes it the newest checkpoint and drops those before the last `keep`. The ranks'
    threads talk on `group`, which nothing else uses. A save that fails (a full disk) leaves nothing, is told, and
    training goes on.
    """

    def __init__(self, folder: Path, lease: Lease | None, keep: int) -> None:
        self.folder, self.lease, self.keep = folder, lease, keep
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.saved_step = -1  # of the newest complete checkpoint of this process
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._step = -1
        self._copy = StateCopy()

    @property
    def is_busy(self) -> bool:
        """Whether this rank still writes."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, state: RunState, manifest: Manifest, token: str, control: dist.ProcessGroup | None) -> None:
        """Save `state` as of now. `token`: of the group of ranks; `control`: ranks agree on it in the caller's thread.

        It waits for the save before.
        """
        self.finish()
        others = state.write_others(control)
        path = partial_path(self.folder, manifest.step, token)
        self._step, tensors = manifest.step, state.tensors()
        values = without_values(tensors)
        arguments = ((self._copy.take(tensors), values, others), path, manifest)
        self._thread = threading.Thread(target=self._complete, args=arguments, daemon=True, name="autopar save")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save that was begun. LeaseLost if another group has taken the folder; what else made it fail is
        told.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if isinstance(self._failure, LeaseLost):
            raise self._failure
        if self._failure is None:
            self.saved_step = self._step
        elif dist.get_rank() == 0:
            warn(f"the checkpoint after step {self._step} was not saved, training goes on: {self._failure}")

    def failure(self) -> BaseException | None:
        """Why the last save failed; None if it did not."""
        return self._failure

    def _complete(self, content: tuple[Any, dict[str, Any], bytes | None], path: Path, manifest: Manifest) -> None:
        """The rest of a save, in a thread of each rank."""
        start_s = time.perf_counter()
        try:
            with _giving_way():
                self._failure = self._committed(self._files(*content, path), path, manifest, start_s)
        except BaseException as error:  # of a connection: another rank died, and torchrun ends this one
            self._failure = error

    def _committed(
        self, own: dict[str, list] | Exception, path: Path, manifest: Manifest, start_s: float
    ) -> Exception | None:
        """The first error of any rank; None if the checkpoint is complete."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own, group=self.group)
        seconds = time.perf_counter() - start_s
        outcome: list[Exception | None] = [next((each for each in ranks if isinstance(each, Exception)), None)]
        if self.lease is not None:
            if outcome[0] is None:
                files = {name: entry for each in ranks for name, entry in each.items()}
                outcome = [self._renamed(path, replace(manifest, files=files, seconds=seconds), self.lease)]
            if outcome[0] is not None:
                shutil.rmtree(path, ignore_errors=True)
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        return outcome[0]

    def _renamed(self, path: Path, manifest: Manifest, lease: Lease) -> Exception | None:
        try:
            with lease.held():
                commit(path, self.folder, manifest)
                drop_older(self.folder, self.keep)
        except (OSError, DamagedCheckpoint, AutoparError) as error:
            return error
        return None

    def _files(
        self, tensors: Any, values: dict[str, Any], others: bytes | None, path: Path
    ) -> dict[str, list] | Exception:
        """Name -> [bytes, sha256] of the files that this rank writes, read back; the error if it could not."""
        try:
            dcp.save(tensors, storage_writer=FileSystemWriter(path), process_group=self.group)
            ranks: list[Any] | None = None if others is None else [None] * dist.get_world_size()
            dist.gather_object(values, ranks, dst=0, group=self.group)
            if others is not None and ranks is not None:
                save_others(others, {name: x for own in ranks for name, x in own.items()}, path)
            # torch names a rank's files after it; the first rank also writes what is there once
            mine = [file for file in path.iterdir() if file.name.startswith(f"__{dist.get_rank()}_")]
            if others is not None:
                mine += [file for file in path.iterdir() if not file.name.startswith("__")]
            return {file.name: fingerprint_file(file) for file in mine}
        except BaseException as error:  # torch's CheckpointException is no Exception
            return AutoparError(f"rank {dist.get_rank()}: {type(error).__name__}: {_first_line(error)}")


@contextmanager
def _giving_way() -> Iterator[None]:
    """A context in which this thread has a low priority, and a thread that asks for Python's lock is given it after
    50 us, not 5 ms as by default.

    Each op of the thread that trains gives the lock up and asks for it again; every time, the thread that saves would
    keep it for as long.
    """
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(_SWITCH_S, usual))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _first_line(error: BaseException) -> str:
    """The cause in a line; torch lists all ranks' errors with their tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line and not line.startswith("raise")]
    return (causes or lines or [""])[-1]
