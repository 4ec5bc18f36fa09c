"""Checkpoints in a folder: each is complete, and known by checksums to be as it was written, or is none."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{10})")
_PARTIAL = ".saving-"


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is missing or differs from what was written; the message says which, and how."""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint. `tensors`: name -> [shape, dtype] of the model's state; `files`: name -> [bytes,
    sha256].

    `global_batch`: samples of a step, None if no sampler tells it. `seconds`: of writing the files and reading them
    back, 0 if that is not known.
    """

    step: int
    num_ranks: int
    job: str
    global_batch: int | None
    tensors: Mapping[str, Any]
    files: Mapping[str, Any]
    seconds: float = 0.0


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return folder / f"step-{step:010d}"


def partial_path(folder: Path, step: int, token: str) -> Path:
    """Where it is while it is written, by the group of ranks with this token."""
    return folder / f"{_PARTIAL}{step:010d}-{token}"


def complete(folder: Path) -> list[Path]:
    """All checkpoints of the folder, newest first."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def step_of(path: Path) -> int:
    """The number of steps after which the checkpoint was made."""
    return int(path.name.removeprefix("step-"))


def fingerprint_file(path: Path) -> list:
    """[bytes, sha256] of a file as it is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; DamagedCheckpoint if it is not whole."""
    try:
        saved = json.loads((path / MANIFEST).read_text())
        body = saved["manifest"]
        if hashlib.sha256(_text(body).encode()).hexdigest() != saved["sha256"]:
            raise DamagedCheckpoint(f"{MANIFEST} differs from its checksum")
        found = Manifest(**body)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    if found.step != step_of(path):
        raise DamagedCheckpoint(f"{MANIFEST} is of step {found.step}")
    return found


def newest_rate(folder: Path) -> float | None:
    """Bytes a second at which all ranks together wrote the newest checkpoint and read it back; None if none tells."""
    for path in complete(folder):
        with suppress(DamagedCheckpoint):
            found = read_manifest(path)
            if found.seconds > 0:
                return sum(size for size, _ in found.files.values()) / found.seconds
    return None


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """DamagedCheckpoint unless these files of the checkpoint are as they were written."""
    for name in names:
        expected = list(manifest.files[name])
        try:
            found = fingerprint_file(path / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read ({error.strerror})") from error
        if found[0] != expected[0]:
            raise DamagedCheckpoint(f"{name} has {found[0]} bytes, expected {expected[0]}")
        if found != expected:
            raise DamagedCheckpoint(f"{name} differs from its checksum: found {found[1]}, expected {expected[1]}")


def commit(partial: Path, folder: Path, manifest: Manifest) -> Path:
    """Make the files written into `partial` a checkpoint: from one rename on it is there, complete.

    OSError if the disk is full. The caller holds the folder's lease.
    """
    body = asdict(manifest)
    text = json.dumps({"manifest": body, "sha256": hashlib.sha256(_text(body).encode()).hexdigest()})
    with open(partial / MANIFEST, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    path = path_of(folder, manifest.step)
    if path.exists():  # one that was found damaged, or of steps that are done again
        shutil.rmtree(path)
    sync_folder(partial)
    os.rename(partial, path)
    sync_folder(folder)
    return path


def drop_older(folder: Path, keep: int, read_back: Collection[str] = ()) -> None:
    """Drop all but the newest `keep` checkpoints, if the newest is as it was written; DamagedCheckpoint otherwise.

    `read_back`: its files that were read from the disk by those that wrote them, and are not read again.
    """
    newest, *_ = paths = complete(folder)
    if len(paths) <= keep:
        return
    manifest = read_manifest(newest)
    check_files(newest, manifest, set(manifest.files).difference(read_back))
    for path in paths[keep:]:
        away = path.with_name(f"{_PARTIAL}dropped-{path.name}")
        os.rename(path, away)  # so that no half of it is ever taken for a checkpoint
        shutil.rmtree(away)


def drop_partial(folder: Path) -> None:
    """Remove what saves that did not complete have left. The caller holds the folder's lease."""
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)
