"""`StateImage`: the tensors of a state in memory, as they lie in a rank's file of a checkpoint."""

import io
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from autopar.elastic import write_image
from autopar.errors import AutoparError
from autopar.torch_compat import StorageInfo, pytree


class StateImage:
    """A state as the files of a checkpoint of `torch.distributed.checkpoint`, one of each rank, in memory that is kept
    from one checkpoint to the next.

    torch plans who writes what, and what a file has beside the bytes of tensors; as long as states are alike, only
    these bytes change. So `take` copies them, once, to where they belong, and `write` has a process put the memory on
    the disk as it is. A rank copies what it writes, not what others do.
    """

    def __init__(self) -> None:
        self._like: Any = None
        self._file: _File | None = None

    def take(self, state: Mapping[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
        """Copy this rank's part of `state`, nested dicts of tensors and other items, for a checkpoint in `path`.

        All ranks of `group` call it alike, the first of them with rank 0. CheckpointException if they cannot agree.
        """
        like, planner = _likeness(state), DefaultSavePlanner()
        is_other: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(is_other, self._file is None or like != self._like, group=group)
        if any(is_other):
            self.close()
            self._file = _File(path)
            dcp.save(dict(state), storage_writer=self._file, planner=planner, process_group=group)
            self._like = like
        else:
            planner.set_up_planner(dict(state), is_coordinator=dist.get_rank(group) == 0)
        assert self._file is not None, "it was laid out"
        self._file.fill(planner)

    def write(self, path: Path) -> dict[str, list]:
        """Name -> [bytes, sha256] of this rank's file, written into the folder `path` and read back; on the first rank
        the metadata is written too. OSError or AutoparError if that fails.
        """
        assert self._file is not None, "a state was taken"
        return self._file.write(path)

    def close(self) -> None:
        """Give the memory back, and end the process."""
        if self._file is not None:
            self._file.close()
        self._like = self._file = None


class _File(FileSystemWriter):
    """A writer of `torch.distributed.checkpoint`, which lays this rank's file out in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._places: list[tuple[WriteItem, int, int]] = []  # of a tensor's bytes: the first, how many
        self._name, self._memory = "", Memory(0)
        self._metadata: tuple[Metadata, list[list[WriteResult]]] | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Lay out what this rank writes, without the bytes of its tensors."""
        self._name = f"{plan.storage_data.prefix}0.distcp"
        known: dict[Any, _Skeleton] = {}  # tensors that are alike have equal ones, and there are few kinds
        skeletons, results, start = [], [], 0
        for item in plan.items:
            content = planner.resolve_data(item)
            kind = item.index if item.type == WriteItemType.BYTE_IO else _kind(content)
            if kind not in known:
                known[kind] = _skeleton_of(item, content)
            skeletons.append((start, skeleton := known[kind]))
            self._places += [(item, start + at, size) for at, size in skeleton.gaps]
            results.append(WriteResult(item.index, skeleton.end, StorageInfo(self._name, start, skeleton.end)))
            start += skeleton.end
        self._memory = Memory(start)
        for first, skeleton in skeletons:
            for at, part in skeleton.parts:
                self._memory.view[first + at :][: len(part)] = torch.frombuffer(part, dtype=torch.uint8)
        done = Future[list[WriteResult]]()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the content of the file that says what is where, the same in each checkpoint; on the first rank."""
        self._metadata = metadata, results

    @torch.no_grad()
    def fill(self, planner: SavePlanner) -> None:
        """Copy the bytes of the tensors that `planner` has."""
        is_cuda = False
        for item, at, size in self._places:
            x = planner.resolve_data(item)
            assert isinstance(x, torch.Tensor) and x.nbytes == size, "states are alike"
            room = self._memory.pinned() if x.is_cuda else self._memory.view
            room[at : at + size].copy_(x.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            is_cuda |= x.is_cuda
        if is_cuda:
            torch.cuda.synchronize()

    def write(self, path: Path) -> dict[str, list]:
        """As `StateImage.write`."""
        found = {self._name: self._memory.write(path / self._name)} if self._memory.size else {}
        if self._metadata is not None:
            self.reset(path)
            super().finish(*self._metadata)
        return found

    def close(self) -> None:
        """As `StateImage.close`."""
        self._memory.close()


class Memory:
    """`size` bytes that are shared with `process`, which writes them into files; `view`: as a tensor."""

    def __init__(self, size: int) -> None:
        self.size, self.view = size, torch.empty(0, dtype=torch.uint8)
        self.process: subprocess.Popen | None = None
        self._is_pinned = False
        if not size:
            return
        self._file = _file_in_memory()
        os.ftruncate(self._file.fileno(), size)
        if hasattr(os, "posix_fallocate"):  # an error now, where memory is short, and no signal when it is written to
            os.posix_fallocate(self._file.fileno(), 0, size)
        self.view = torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.uint8)

    def pinned(self) -> torch.Tensor:
        """The view, to which a GPU copies by itself."""
        if not self._is_pinned:
            torch.cuda.check_error(_cuda().cudaHostRegister(self.view.data_ptr(), self.size, 0))
            self._is_pinned = True
        return self.view

    def write(self, path: Path) -> list:
        """[bytes, sha256] of the file `path`, whose content is then the memory's; AutoparError if it is not written."""
        if self.process is None or self.process.poll() is not None:
            # -I -S: nothing of the user's environment is imported; a session of its own: Ctrl-C is for the rank
            command = [sys.executable, "-I", "-S", write_image.__file__, str(self._file.fileno()), str(self.size)]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(self._file.fileno(),),
                start_new_session=True,
            )
        answer = self._asked(self.process, path)
        if isinstance(answer, str):
            raise AutoparError(answer)
        return answer

    def _asked(self, process: subprocess.Popen, path: Path) -> list | str:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(str(path)) + "\n")
            process.stdin.flush()
        if line := process.stdout.readline():
            return json.loads(line)
        return f"the process that writes {path.name} ended with status {process.wait()}"

    def close(self) -> None:
        """Give it back, and end the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        if self._is_pinned:
            torch.cuda.check_error(_cuda().cudaHostUnregister(self.view.data_ptr()))
        if self.size:
            self._file.close()
        self.size, self.view = 0, torch.empty(0, dtype=torch.uint8)


def _cuda() -> Any:
    """CUDA's runtime. Memory that others allocated is pinned by it alone, not by torch."""
    return torch.cuda.cudart()


def _file_in_memory() -> BinaryIO:
    """A file without a name. It is not of /dev/shm, which is 64 MB in many containers."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("autopar save"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())


class _Skeleton(io.RawIOBase):
    """A stream that keeps what is written to it, and where it is skipped: (first byte, content or how many)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[int, bytearray]] = []
        self.gaps: list[tuple[int, int]] = []
        self.end = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        if not self.parts or self.parts[-1][0] + len(self.parts[-1][1]) != self.end:
            self.parts.append((self.end, bytearray()))
        self.parts[-1][1].extend(content)
        self.end += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR, "torch.save skips a storage from where it is"
        self.gaps.append((self.end, offset))
        self.end += offset
        return self.end


def _skeleton_of(item: WriteItem, content: Any) -> _Skeleton:
    """The content of a file that `torch.save` writes of a tensor, without its bytes; of anything else, all."""
    skeleton = _Skeleton()
    if item.type == WriteItemType.BYTE_IO:
        skeleton.write(content.getbuffer())
        return skeleton
    if type(content) not in (torch.Tensor, torch.nn.Parameter) or content.layout is not torch.strided:
        raise AutoparError(
            f"{item.index.fqn} is a {type(content).__name__} of layout {content.layout}: `Run` saves plain tensors and"
            " DTensors of such; leave it out of the module's state_dict(), or give it as a plain one"
        )
    with torch.serialization.skip_data():
        torch.save(torch.empty(content.shape, dtype=content.dtype), cast(BinaryIO, skeleton))
    assert sum(size for _, size in skeleton.gaps) == content.nbytes, "torch.save skips the bytes of a storage"
    return skeleton


def _likeness(state: Mapping[str, Any]) -> Any:
    """Equal for states whose files differ in the bytes of tensors alone."""
    leaves, structure = pytree.tree_flatten(dict(state))
    return structure, [_kind(x) for x in leaves]


def _kind(x: Any) -> Any:
    if isinstance(x, DTensor):
        return x._spec, x._local_tensor.shape, x.dtype
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()
