"""Whole state of a sharded module and of its optimizer: that of one device, and read back under any plan."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from tests.journey.stack import Stack
from tests.journey.stack import batch as stack_batch
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank
BATCH, WIDTH = 8, 16


class Tied(nn.Module):
    """Two names for one weight, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.last(self.first(x).tanh())

    def save_pretrained(self, folder: str, is_main_process: bool = True, state_dict: Any = None) -> bool:
        """As transformers and peft have it."""
        if is_main_process:
            torch.save(state_dict, f"{folder}/whole.pt")
        return is_main_process


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sharded(model: nn.Module, shape: tuple[int, ...] = (2, 2), axes: tuple[str, ...] = ("dp", "tp")) -> nn.Module:
    return autopar.compile(model, device_mesh(shape, axes), cluster="free-links", args=(batch(0),))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(batch(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(model: nn.Module, num_steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(num_steps):
        step(model, optimizer, seed)
    return optimizer


def state_after_steps() -> tuple[dict[str, Any], dict[str, Any], bool, bool, bool]:
    model = sharded(tied())
    trained(model)
    state, alone = model.full_state_dict(), model.full_state_dict(rank0_only=True)
    is_split = any(not p.is_replicate() for x in model.parameters() for p in x.placements)
    is_tied = state["first.weight"].data_ptr() == state["last.weight"].data_ptr()
    state["count"].add_(1)  # a copy, so that the model has its own still
    is_copy = not torch.equal(model.full_state_dict()["count"], state["count"])
    state["count"].sub_(1)
    return state, alone, is_split, is_tied, is_copy


def test_a_full_state_is_that_of_one_device(ranks4: Ranks) -> None:
    one = tied()
    trained(one)
    for rank, (state, alone, is_split, is_tied, is_copy) in enumerate(ranks4.run(state_after_steps)):
        assert is_split and is_tied and is_copy
        assert list(state) == list(one.state_dict()) and list(alone) == (list(state) if rank == 0 else [])
        for name, x in one.state_dict().items():
            torch.testing.assert_close(state[name], x)
            assert type(state[name]) is torch.Tensor


def resumed() -> list[torch.Tensor]:
    """The third step from the state of the first two: on one device, and under another plan."""
    model = sharded(tied())
    optimizer = trained(model)
    saved, whole = model.full_optimizer_state_dict(optimizer), model.full_state_dict()
    ends = []
    for other in (tied(), sharded(tied(), (4,), ("dp",))):
        other.load_state_dict(whole)
        again = torch.optim.AdamW(other.parameters(), lr=1e-2)
        again.load_state_dict(copy.deepcopy(saved))  # torch takes the tensors themselves
        step(other, again, 2)
        state = other.state_dict() if type(other) is Tied else other.full_state_dict()
        ends.append(state["first.weight"])
    return ends


def test_whole_optimizer_state_is_read_under_another_plan_and_on_one_device(ranks4: Ranks) -> None:
    one = tied()
    trained(one, 3)
    for ends in ranks4.run(resumed):
        for end in ends:
            torch.testing.assert_close(end, one.first.weight.detach())


def parts_of_the_first_rank(folder: str) -> str:
    """What comes of an optimizer's state that the first rank saved for all, as trainers do."""
    model = sharded(tied())
    optimizer = trained(model)
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
    dist.barrier()
    model(batch(2)).square().mean().backward()
    optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt"))
    try:
        optimizer.step()
    except AutoparError as error:
        return str(error)
    return ""


def test_parts_of_another_rank_are_refused_before_a_step_with_them(ranks4: Ranks, tmp_path: Path) -> None:
    first, *others = ranks4.run(parts_of_the_first_rank, str(tmp_path))
    assert first == ""
    for message in others:
        assert "another rank saved" in message and "full_optimizer_state_dict" in message


def saved_pretrained(folder: str) -> list[bool]:
    model = sharded(tied())
    results = [model.save_pretrained(folder, is_main_process=False)]
    for options in ({}, {"state_dict": model.state_dict()}):  # which Accelerator.get_state_dict gives
        results.append(model.save_pretrained(folder, **options))
        state = torch.load(f"{folder}/whole.pt")
        assert not any(isinstance(x, DTensor) for x in state.values())
        torch.testing.assert_close(state, dict(tied().state_dict()))
        torch.distributed.barrier()  # all have read it
    return results


def test_save_pretrained_writes_whole_tensors_on_the_first_rank(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(saved_pretrained, str(tmp_path)) == [[False, True, True], *([[False] * 3] * 3)]


def loaded_before_the_plan() -> torch.Tensor:
    model, other = tied(), tied()
    with torch.no_grad():
        other.first.weight.mul_(3)
    model = autopar.compile(model, device_mesh((4,), ("dp",)), cluster="free-links")
    model.load_state_dict(other.state_dict())
    return model(batch(0)).full_tensor() if isinstance(model(batch(0)), DTensor) else model(batch(0))


def test_a_state_is_loaded_before_the_first_call(ranks4: Ranks) -> None:
    one = tied()
    with torch.no_grad():
        one.first.weight.mul_(3)
    for output in ranks4.run(loaded_before_the_plan):
        torch.testing.assert_close(output, one(batch(0)).detach(), check_stride=False)


def compiled_again() -> torch.Tensor:
    """A module out of a compiled one is compiled by itself, with the tensors it has."""
    model = sharded(nn.Sequential(tied(), nn.Linear(WIDTH, WIDTH).double()))
    part = autopar.compile(model[0], device_mesh((4,), ("dp",)), cluster="free-links")
    output = part(batch(0)).detach()
    return output.full_tensor() if isinstance(output, DTensor) else output


def test_a_part_of_a_compiled_module_is_compiled_again(ranks4: Ranks) -> None:
    for output in ranks4.run(compiled_again):
        torch.testing.assert_close(output, tied()(batch(0)).detach())


def state_with_stages() -> tuple[dict[str, Any], dict[str, Any], int]:
    torch.manual_seed(0)
    model = Stack()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model = autopar.compile(model, device_mesh((2, 2), ("pp", "dp")), args=stack_batch(), num_microbatches=2)
    return before, model.full_state_dict(), len(model.full_state_dict(rank0_only=True))


def test_with_stages_each_rank_is_given_the_whole_state(ranks4: Ranks) -> None:
    for rank, (before, state, num_alone) in enumerate(ranks4.run(state_with_stages)):
        assert list(state) == list(before) and num_alone == (0 if rank else len(before))
        assert all(torch.equal(state[name], x) for name, x in before.items())


def grouped(model: nn.Module, *, names: bool = False, is_turned: bool = False) -> torch.optim.Optimizer:
    """Weights and biases apart, after a step if there are gradients."""
    named = sorted(model.named_parameters(), reverse=True) if is_turned else list(model.named_parameters())
    groups = [
        {"params": [(fqn, p) if names else p for fqn, p in named if (p.ndim > 1) == is_weight], "weight_decay": decay}
        for is_weight, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    if any(p.grad is not None for _, p in named):
        optimizer.step()
    return optimizer


def optimizers_with_stages() -> tuple[dict[str, Any], int, list[str], list[bool]]:
    """The whole state, how much of it other ranks have with `rank0_only`, errors, and whether a state is read back."""
    torch.manual_seed(0)
    model, args = Stack(), stack_batch()
    model = autopar.compile(model, device_mesh((2, 2), ("pp", "dp")), args=args, num_microbatches=2)
    model.train_step(*args)
    optimizer = grouped(model)
    state, num_alone = (
        model.full_optimizer_state_dict(optimizer),
        len(model.full_optimizer_state_dict(optimizer, rank0_only=True)),
    )
    errors, is_same = [], []
    with pytest.raises(AutoparError) as turned:
        model.full_optimizer_state_dict(grouped(model, is_turned=True))
    unnamed = {**state, "param_groups": [{**each} for each in state["param_groups"]]}
    for each in unnamed["param_groups"]:
        del each["param_names"]
    with pytest.raises(AutoparError) as numbered:
        grouped(model).load_state_dict(unnamed)
    errors = [str(turned.value), str(numbered.value)]
    model.zero_grad()
    for names in (False, True):
        other = grouped(model, names=names)
        other.load_state_dict(state)
        again = model.full_optimizer_state_dict(other)
        is_same.append(
            all(torch.equal(again["state"][i][k], x) for i, own in state["state"].items() for k, x in own.items())
        )
    return state, num_alone, errors, is_same


def test_with_stages_the_whole_state_of_the_optimizer_is_that_of_one_device(ranks4: Ranks) -> None:
    torch.manual_seed(0)
    model, args = Stack(), stack_batch()
    model(*args).backward()
    expected = grouped(model).state_dict()
    for rank, (state, num_alone, errors, is_same) in enumerate(ranks4.run(optimizers_with_stages)):
        assert [each["params"] for each in state["param_groups"]] == [
            each["params"] for each in expected["param_groups"]
        ]
        assert [each["weight_decay"] for each in state["param_groups"]] == [0.1, 0.0]
        assert state["state"].keys() == expected["state"].keys()
        for number, own in expected["state"].items():
            torch.testing.assert_close(state["state"][number], own)
        assert num_alone == (0 if rank else 2)
        assert "not in the order of the model" in errors[0] and "named_parameters" in errors[1]
        assert is_same == [True, True]
