"""A checkpoint is complete and as it was written, or it is none."""

import json
from dataclasses import replace

import pytest

from autopar.elastic.checkpoints import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    check_files,
    commit,
    complete,
    drop_older,
    drop_partial,
    fingerprint_file,
    partial_path,
    path_of,
    read_manifest,
    step_of,
)

EMPTY = Manifest(0, 4, "job", 32, {"w": [[2, 3], "torch.float32"]}, {})


def save(folder, step, content=b"0123456789"):
    partial = partial_path(folder, step, "token")
    partial.mkdir()
    (partial / "part").write_bytes(content)
    files = {"part": fingerprint_file(partial / "part")}
    return commit(partial, folder, replace(EMPTY, step=step, files=files))


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    path = save(tmp_path, 7)
    manifest = read_manifest(path)
    check_files(path, manifest, manifest.files)
    assert (manifest.step, manifest.tensors, step_of(path)) == (7, EMPTY.tensors, 7)
    assert complete(tmp_path) == [path == path_of(tmp_path, 7) and path]


def test_what_was_not_renamed_is_no_checkpoint_and_is_removed(tmp_path):
    partial = partial_path(tmp_path, 3, "token")
    partial.mkdir()
    (partial / "part").write_bytes(b"half")
    assert complete(tmp_path) == []
    drop_partial(tmp_path)
    assert not partial.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "part").write_bytes(b"0123456788"), "part differs from its checksum"),
        (lambda path: (path / "part").write_bytes(b"012345678"), "part has 9 bytes, expected 10"),
        (lambda path: (path / "part").unlink(), "part cannot be read .No such file"),
    ],
)
def test_a_changed_file_is_named(tmp_path, damage, message):
    path = save(tmp_path, 7)
    damage(path)
    manifest = read_manifest(path)
    with pytest.raises(DamagedCheckpoint, match=message):
        check_files(path, manifest, manifest.files)


def other_step(text):
    saved = json.loads(text)
    saved["manifest"]["num_ranks"] = 3
    return json.dumps(saved)


@pytest.mark.parametrize("change", [lambda text: text[:-9], lambda text: "[]", lambda text: "", other_step])
def test_a_changed_manifest_is_named(tmp_path, change):
    path = save(tmp_path, 7)
    (path / MANIFEST).write_text(change((path / MANIFEST).read_text()))
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        read_manifest(path)


def test_a_manifest_of_another_step_is_named(tmp_path):
    path = save(tmp_path, 7)
    path.rename(path_of(tmp_path, 8))
    with pytest.raises(DamagedCheckpoint, match="of step 7"):
        read_manifest(path_of(tmp_path, 8))


def test_older_ones_are_dropped_only_behind_a_sound_one(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    (paths[2] / "part").write_bytes(b"damaged...")
    with pytest.raises(DamagedCheckpoint):
        drop_older(tmp_path, 1, ["another"])
    assert complete(tmp_path) == paths[::-1]
    save(tmp_path, 3)  # again, in place of the damaged one
    drop_older(tmp_path, 2)
    assert complete(tmp_path) == [paths[2], paths[1]]
    assert not list(tmp_path.glob(".saving-*"))


def test_steps_are_ordered_by_number(tmp_path):
    paths = [save(tmp_path, step) for step in (9, 100, 20)]
    assert complete(tmp_path) == [paths[1], paths[2], paths[0]]
