"""`BackgroundSave`: checkpoints written beside training, each of them complete or none."""

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from autopar.elastic.checkpoints import DamagedCheckpoint, Manifest, commit, drop_older, fingerprint_file, partial_path
from autopar.elastic.file_image import StateImage
from autopar.elastic.lease import Lease, LeaseLost
from autopar.elastic.run_state import RunState, save_others, without_values
from autopar.errors import AutoparError, warn


class BackgroundSave:
    """Saves into `folder`, one at a time; every rank calls it alike. `lease`: on the first rank.

    `start` copies the state into memory that is kept for that, which is all that delays a step. A process of low
    priority writes it and reads it back; a thread waits for that, and the first rank makes it the newest checkpoint and
    drops those before the last `keep`. The ranks' threads talk on `group`, which nothing else uses. A save that fails
    (a full disk) leaves nothing, is told, and training goes on.
    """

    def __init__(self, folder: Path, lease: Lease | None, keep: int) -> None:
        self.folder, self.lease, self.keep = folder, lease, keep
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.saved_step = -1  # of the newest complete checkpoint of this process
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._step = -1
        self._image = StateImage()

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
        values, failure = without_values(tensors), None
        try:
            self._image.take(tensors, path, self.group)
        except (Exception, CheckpointException) as error:  # which is no Exception
            failure = _told(error)
        arguments = (failure, values, others, path, manifest)
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

    def close(self) -> None:
        """Give back what is kept for the next save; `finish` was called."""
        self._image.close()

    def _complete(
        self, failure: Exception | None, values: dict[str, Any], others: bytes | None, path: Path, manifest: Manifest
    ) -> None:
        """The rest of a save, in a thread of each rank."""
        start_s = time.perf_counter()
        try:
            ranks: list[Any] | None = None if others is None else [None] * dist.get_world_size()
            dist.gather_object(values, ranks, dst=0, group=self.group)
            own = failure or self._files(ranks, others, path)
            self._failure = self._committed(own, path, manifest, start_s)
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
                drop_older(self.folder, self.keep, [name for name in manifest.files if name.startswith("__")])
        except (OSError, DamagedCheckpoint, AutoparError) as error:
            return error
        return None

    def _files(
        self, values: list[dict[str, Any]] | None, others: bytes | None, path: Path
    ) -> dict[str, list] | Exception:
        """Name -> [bytes, sha256] of the files that this rank writes, read back; the error if it could not."""
        try:
            found = self._image.write(path)
            if others is not None and values is not None:
                save_others(others, {name: x for own in values for name, x in own.items()}, path)
                # torch names ranks' files after them
                found |= {file.name: fingerprint_file(file) for file in path.iterdir() if file.name[:2] != "__"}
            return found
        except Exception as error:
            return _told(error)


def _told(error: BaseException) -> AutoparError:
    return AutoparError(f"rank {dist.get_rank()}: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """The cause in a line; torch lists all ranks' errors with their tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line and not line.startswith("raise")]
    return (causes or lines or [""])[-1]
