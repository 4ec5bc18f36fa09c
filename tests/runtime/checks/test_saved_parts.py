"""Files of parts: one rank's file is not read by another, and no checkpoint mixes the numbers of stages' optimizers."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import autopar
from autopar.errors import AutoparError
from tests.journey.stack import Stack, batch
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


def trained(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    args = batch()
    model = autopar.compile(Stack(), device_mesh(shape, axes), args=args, cluster="free-links", num_microbatches=2)
    optimizer = torch.optim.AdamW(model.parameters())
    model.train_step(*args)
    optimizer.step()
    return model, optimizer


def numbered(path: str) -> list[str]:
    """What comes of an optimizer's state dict with stages, in torch's ways to save and load it."""
    model, optimizer = trained((2, 2), ("pp", "dp"))
    state = optimizer.state_dict()
    found = []
    for content in ({"optimizer": state}, {"optimizer": optimizer}, {"app": {"all": [state]}}, state):
        for function in (checkpoint.save, checkpoint.async_save):
            with pytest.raises(CheckpointException) as error:
                result = function(content, checkpoint_id=path)
                result.result() if function is checkpoint.async_save else None
            found.append(str(error.value))
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)
    return found


def test_numbers_of_stages_are_in_no_checkpoint(ranks4: Ranks, tmp_path: Path) -> None:
    for found in ranks4.run(numbered, str(tmp_path)):
        assert all("state of the optimizer is numbered" in error for error in found), found


def read_by_number(path: str) -> str:
    """What comes of one device's checkpoint, read by number into stages."""
    single = Stack()
    optimizer = torch.optim.AdamW(single.parameters())
    single(*batch()).backward()
    optimizer.step()
    checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=path)
    _, optimizer = trained((2, 2), ("pp", "dp"))
    with pytest.raises(CheckpointException) as error:
        checkpoint.load({"optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return str(error.value)


def test_numbers_of_one_device_are_not_read_into_stages(ranks4: Ranks, tmp_path: Path) -> None:
    assert all("state of the optimizer is numbered" in error for error in ranks4.run(read_by_number, str(tmp_path)))


def file_of_each_rank(path: str) -> tuple[list[str], str, bool]:
    """Warnings of torch.save, what comes of the first rank's file, and whether the rank's own is read."""
    model, _ = trained((4,), ("dp",))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.save(model.state_dict(), f"{path}/{dist.get_rank()}.pt")
        torch.save(model.state_dict(), f"{path}/{dist.get_rank()}.pt")
    dist.barrier()
    before = {fqn: x.full_tensor() for fqn, x in model.state_dict().items()}
    own = torch.load(f"{path}/{dist.get_rank()}.pt")
    model.load_state_dict(own)
    is_same = all(torch.equal(x.full_tensor(), before[fqn]) for fqn, x in model.state_dict().items())
    try:
        model.load_state_dict(torch.load(f"{path}/0.pt"))
    except AutoparError as error:
        return [str(each.message) for each in told], str(error), is_same
    return [str(each.message) for each in told], "", is_same


def test_a_file_of_parts_is_told_of_and_not_read_by_others(ranks4: Ranks, tmp_path: Path) -> None:
    for rank, (told, error, is_same) in enumerate(ranks4.run(file_of_each_rank, str(tmp_path))):
        assert is_same
        assert len([text for text in told if "this rank's parts" in text]) <= 1  # once in the process
        assert bool(error) == (rank > 0) and (not rank or "parts that another rank saved" in error)
