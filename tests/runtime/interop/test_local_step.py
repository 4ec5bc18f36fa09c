"""Optimizer steps on parts: the same bits as on DTensors, which the optimizer still has between two steps."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.interop import local_step
from tests.workers import Ranks, device_mesh

OPTIMIZERS = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"foreach": True},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {"maximize": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))  # of no dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layers(x).square().mean()


def steps(name: str, options: dict, on_parts: bool) -> tuple[list[torch.Tensor], dict]:
    """(parameters, state) after three steps."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    sharded = autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), args=(x,), cluster="free-links")
    assert any(p.to_local().numel() < p.numel() for p in sharded.parameters())
    optimizer = getattr(torch.optim, name)(sharded.parameters(), lr=0.01, **options)
    if not on_parts:
        vars(optimizer)["_autopar_step"] = None  # as if its step had been replaced
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    whole = list(optimizer.param_groups[0]["params"])
    for _ in range(3):
        optimizer.zero_grad()
        sharded(x).backward()
        optimizer.step()
        scheduler.step()
    assert all(new is old for new, old in zip(optimizer.param_groups[0]["params"], whole, strict=True))
    assert optimizer.param_groups[0].get("foreach") == options.get("foreach")
    assert set(optimizer.state) == set(whole)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    is_on_parts = hasattr(optimizer.step, "_autopar_local_step")
    assert is_on_parts == on_parts
    return [p.full_tensor() for p in sharded.parameters()], state


def same_bits(name: str) -> None:
    options = OPTIMIZERS[name]
    (left, mine), (right, theirs) = (steps(name, options, on_parts) for on_parts in (True, False))
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)
    assert mine.keys() == theirs.keys()
    for number, state in mine.items():
        assert state.keys() == theirs[number].keys()
        for key, value in state.items():
            other = theirs[number][key]
            assert type(value) is type(other), (key, type(value), type(other))
            if isinstance(value, DTensor):
                assert value.placements == other.placements and torch.equal(value.to_local(), other.to_local())
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value, other)


@pytest.mark.multirank
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_as_on_dtensors(ranks4: Ranks, name: str) -> None:
    ranks4.run(same_bits, name)


def others_see_whole() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    sharded = autopar.compile(model, device_mesh((4,), ("dp",)), args=(x,), cluster="free-links")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01)
    for _ in range(2):
        sharded(x).backward()
        optimizer.step()
    seen = []
    handle = optimizer.register_step_pre_hook(lambda optimizer, *_: seen.extend(optimizer.param_groups[0]["params"]))
    optimizer.step()
    assert len(seen) == 5 and all(isinstance(p, DTensor) for p in seen)
    handle.remove()
    of_another = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    of_another.param_groups[0]["params"][0].grad = torch.ones(2)
    of_another.step()
    assert not hasattr(of_another.step, "_autopar_local_step")
    assert optimizer.step(lambda: sharded(x)) is not None

    before, optimizer.param_groups[0]["lr"] = list(optimizer.param_groups[0]["params"]), torch.tensor([1.0, 2.0])
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        optimizer.step()  # no rate has two numbers
    assert all(new is old for new, old in zip(optimizer.param_groups[0]["params"], before, strict=True))
    assert all(isinstance(p, DTensor) for p in optimizer.state)


@pytest.mark.multirank
def test_hooks_closures_and_failures_leave_dtensors(ranks4: Ranks) -> None:
    ranks4.run(others_see_whole)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def compiled_around() -> None:
    losses = {}
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model, x = Net(), torch.randn(8, 8)
        sharded = autopar.compile(model, device_mesh((4,), ("dp",)), args=(x,), cluster="free-links")
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01, momentum=0.9)
        update = torch.compile(partial(_step, optimizer), backend="eager")
        losses[is_compiled] = []
        for _ in range(3):
            loss = sharded(x)
            loss.backward()
            update() if is_compiled else optimizer.step()
            losses[is_compiled].append(loss.detach())
    assert torch.equal(torch.stack(losses[True]), torch.stack(losses[False]))


@pytest.mark.multirank
def test_a_compiled_function_may_have_the_step_in_it(ranks4: Ranks) -> None:
    ranks4.run(compiled_around)


@pytest.mark.parametrize("largest", [3, 100])
def test_parts_of_a_gpu_are_updated_together_in_few_chunks(largest: int, monkeypatch) -> None:
    """As many bytes as the limit, or as the largest parameter if it has more."""
    monkeypatch.setattr(local_step, "TOGETHER_BYTES", 40)
    tensors = [torch.zeros(size) for size in (2, largest, 3, 4, 1, 5, 2)]
    chunks = local_step.in_chunks(tensors)
    assert [id(x) for chunk in chunks for x in chunk] == list(map(id, tensors))
    most = max(40, 4 * largest)
    assert all(sum(x.nbytes for x in chunk) <= most for chunk in chunks)
    assert len(chunks) == 3
    assert local_step.together_bytes([8, 8]) == 16 and local_step.together_bytes([]) == 0


@pytest.mark.gpu
def test_an_update_on_a_gpu_is_torchs_own() -> None:
    """Bitwise, in chunks or all at once, without more memory than two copies of a chunk."""
    shapes = [(2048, 2048), (64,), (512, 512), (2048, 2048), (7,)]
    alone, whole = ([torch.nn.Parameter(torch.ones(shape, device="cuda")) for shape in shapes] for _ in range(2))
    optimizers = [torch.optim.AdamW(parameters, lr=0.1) for parameters in (alone, whole)]
    torch.manual_seed(0)
    for one, other in zip(alone, whole):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    optimizers[0].step()
    group = optimizers[1].param_groups[0]
    for chunk in local_step.in_chunks(whole):
        optimizers[1].param_groups = [group | {"params": chunk}]
        optimizers[1].step()
    assert all(torch.equal(one, other) for one, other in zip(alone, whole))
