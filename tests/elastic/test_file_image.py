"""A rank's file of a checkpoint, as it lies in memory and as a process writes it."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.elastic import write_image
from autopar.elastic.checkpoints import fingerprint_file
from autopar.elastic.file_image import Memory, StateImage
from autopar.errors import AutoparError
from tests.workers import device_mesh


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(seed: int, size: int = 3) -> dict:
    """Tensors of each kind that a file may have."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    model = {
        "w": draw(size, 2),
        "transposed": draw(5, size).t(),
        "step": draw(()),
        "none": draw(0, 4),
        "half": draw(7).bfloat16(),
        "mask": draw(9) > 0,
        "complex": torch.complex(draw(4), draw(4)),
        "parameter": torch.nn.Parameter(draw(3)),
        "part": draw(4, 4)[1],
    }
    return {"model": model, "extra": {"number": seed}}


def zeros(like: dict) -> dict:
    return {"model": {name: torch.zeros_like(x).detach() for name, x in like["model"].items()}, "extra": {"number": 0}}


def loaded(path: Path, like: dict) -> dict:
    found = zeros(like)
    dcp.load(found, checkpoint_id=path)
    return found


def test_torch_reads_what_was_there_when_it_was_taken(one_rank: None, tmp_path: Path) -> None:
    image, live = StateImage(), state(1)
    for number, seed in enumerate((1, 2, 3)):
        live = state(seed) | {"extra": {"number": 5}}
        image.take(live, tmp_path / f"{number}", None)
        live["model"]["w"].fill_(7.0)
        files = image.write(tmp_path / f"{number}")
        assert files == {name: fingerprint_file(tmp_path / f"{number}" / name) for name in ("__0_0.distcp",)}
    image.close()
    for number, seed in enumerate((1, 2, 3)):
        expected = state(seed) | {"extra": {"number": 5}}
        torch.testing.assert_close(loaded(tmp_path / f"{number}", expected), expected, rtol=0, atol=0)


def test_what_differs_in_more_than_its_tensors_bytes_is_laid_out_anew(one_rank: None, tmp_path: Path) -> None:
    image = StateImage()
    states = [state(1), state(2), state(3, size=5), {**state(4), "average": {"w": torch.ones(2)}}]
    for number, each in enumerate(states):
        image.take(each, tmp_path / f"{number}", None)
        image.write(tmp_path / f"{number}")
    image.close()
    for number, each in enumerate(states[:3]):
        torch.testing.assert_close(loaded(tmp_path / f"{number}", each), each)


def sharded(folder: Path) -> list[int]:
    """The bytes that this rank writes of a tensor that is split, and one that all have."""
    mesh = device_mesh((4,), ("dp",))
    x, y = torch.arange(4096.0).view(64, 64), torch.arange(8192.0)
    placed = {"x": distribute_tensor(x, mesh, [Shard(1)]), "y": distribute_tensor(y, mesh, [Replicate()]), "z": y + 1}
    image = StateImage()
    sizes = []
    for number in range(2):
        image.take(placed, folder / f"{number}", None)
        sizes.append(sum(size for size, _ in image.write(folder / f"{number}").values()))
        dist.barrier()
        found = {"x": distribute_tensor(0 * x, mesh, [Shard(0)]), "y": 0 * y, "z": 0 * y}
        dcp.load(found, checkpoint_id=folder / f"{number}")
        assert isinstance(found["x"], DTensor)
        assert torch.equal(found["x"].full_tensor(), x + number) and torch.equal(found["z"], y + 1 + number)
        placed = {name: each + 1 for name, each in placed.items()}
    image.close()
    return sizes


@pytest.mark.multirank
def test_a_rank_has_a_copy_of_what_it_writes_alone(ranks4, tmp_path: Path) -> None:
    sizes = ranks4.run(sharded, tmp_path)
    once = 4 * (4096 + 8192 + 8192)
    assert once < sum(first for first, _ in sizes) < 1.2 * once
    assert all(first == second for first, second in sizes)


def test_a_process_that_is_killed_is_told_and_replaced(tmp_path: Path) -> None:
    memory = Memory(5)
    memory.view.fill_(ord("a"))
    assert memory.write(tmp_path / "folder" / "one") == fingerprint_file(tmp_path / "folder" / "one")
    assert memory.process is not None
    if sys.platform == "linux":
        assert os.sched_getscheduler(memory.process.pid) == os.SCHED_IDLE
    memory.process.kill()
    while memory.process.poll() is None:
        pass
    memory.write(tmp_path / "two")
    memory.process.stdin.close()  # what it would do at the end of this process
    assert memory.process.wait(10) == 0
    memory.write(tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == b"aaaaa"
    memory.close()


def test_where_there_is_one_scheduler_priority_is_low(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    given = list[int]()
    monkeypatch.setattr(write_image.os, "sched_setscheduler", refused, raising=False)
    monkeypatch.setattr(write_image.os, "nice", given.append)
    write_image.give_way()
    assert given == [19]


def test_a_full_disk_is_told() -> None:
    memory = Memory(5)
    with pytest.raises(AutoparError, match="No space left on device"):
        memory.write(Path("/dev/full"))
    memory.close()


def test_a_file_that_is_read_back_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(descriptor: int) -> None:
        os.pwrite(descriptor, b"z", 3 << 20)

    content = os.urandom(5 << 20)
    assert write_image.written(memoryview(content), tmp_path / "one", os.getppid()) == fingerprint_file(
        tmp_path / "one"
    )
    monkeypatch.setattr(write_image.os, "fsync", damaged)
    with pytest.raises(OSError, match="one differs from what was written when it is read back"):
        write_image.written(memoryview(content), tmp_path / "one", os.getppid())


def test_a_tensor_that_is_not_plain_is_named(one_rank: None, tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(BaseException, match=r"extra is a Tensor of layout torch.sparse_coo") as found:
        StateImage().take({"extra": sparse}, tmp_path, None)
    assert "AutoparError" in str(found.value)
