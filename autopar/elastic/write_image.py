"""A process beside each rank that writes its file of a checkpoint; `SaveProcess` starts it.

    write_image.py DESCRIPTOR SIZE

The file's content lies in memory behind `DESCRIPTOR`, which the rank shares with it. Each line on standard input names,
as JSON, a path; the file is written there, synced, and read back from the disk. The answer, a line of JSON, is its size
and SHA-256, or a text that says why it was not written. The process ends with its standard input, or once the rank has
ended.

It is run by its path and imports nothing but the standard library, so that it takes 10 MB and is there within a tenth
of a second. That it is no thread keeps Python's lock, and a processor, with the rank: it computes when nobody else on
the machine does.
"""

import hashlib
import json
import mmap
import os
import sys
from pathlib import Path

PIECE_BYTES = 1 << 20  # so much is written and then hashed, while it is in a processor's cache


def give_way() -> None:
    """Leave the processors to whoever else wants them."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or a sandbox that has one scheduler
        os.nice(19)


def written(memory: memoryview, path: Path, rank: int) -> list:
    """[bytes, sha256] of the file, which is as the memory is; OSError if it is not. `rank`: the process that asks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with open(path, "w+b", buffering=0) as file:
        at = 0
        while at < len(memory):
            if os.getppid() != rank:
                raise SystemExit  # nobody makes a checkpoint of it
            size = file.write(memory[at : at + PIECE_BYTES])
            digest.update(memory[at : at + size])
            at += size
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # what was synced is dropped from memory, and so comes from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        piece, at = bytearray(PIECE_BYTES), 0
        while size := file.readinto(piece):
            del piece[size:]
            if piece != memory[at : at + size]:  # a bytearray is compared at once, bytes and memoryview one by one
                break
            at += size
    if at != len(memory):
        raise OSError(f"{path.name} differs from what was written when it is read back, from byte {at} on")
    return [at, digest.hexdigest()]


def main(descriptor: int, size: int) -> None:
    """Write the memory to each path that is named."""
    rank = os.getppid()
    give_way()
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as shared, memoryview(shared) as memory:
        for line in sys.stdin:
            try:
                answer: list | str = written(memory, Path(json.loads(line)), rank)
            except OSError as error:
                answer = f"{type(error).__name__}: {error}"
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
