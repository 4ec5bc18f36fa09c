"""Optimizers whose updates need whole weights, on any layout as on one device."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import autopar
from autopar.errors import AutoparError
from autopar.mesh import parse_mesh
from tests.workers import Ranks, device_mesh

STEPS = 4


class Preconditioned(torch.optim.Optimizer):
    """Shampoo (Gupta et al., 2018) in small, with plain state, a step size that all parameters share, and noise."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "seen": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["seen"] += sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
            for p in (p for p in group["params"] if p.grad is not None):
                rows = p.grad.reshape(len(p), -1)
                state = self.state[p]
                if not state:
                    state["left"] = torch.eye(rows.shape[0], dtype=rows.dtype)
                state["left"] += rows @ rows.T
                values, vectors = torch.linalg.eigh(state["left"])
                update = vectors @ (vectors.T @ rows / values.sqrt()[:, None])
                p.data -= group["lr"] / group["seen"] * (update.reshape(p.shape) + 0.01 * torch.randn(p.shape))
        return loss


def lbfgs(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


def adafactor(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.1)


PINS = {"a=2,b=2": {"0.weight": "S(0)B", "2.weight": "BS(1)"}, "b=4": {"0.weight": "S(0)"}}
MADE = {made.__name__: made for made in (Preconditioned, lbfgs, adafactor)}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 11), nn.Tanh(), nn.Linear(11, 4)).double()


def batch() -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The loss before a step."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())


def on_one_device(name: str) -> list[float]:
    model = net()
    optimizer = MADE[name](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: [p.mul_(0.9) for p in map(detached, model.parameters())] and None)
    torch.manual_seed(2)
    return [stepped(model, optimizer) for _ in range(STEPS)]


def detached(p: torch.Tensor) -> torch.Tensor:
    return p.detach()


def compiled(mesh: str) -> nn.Module:
    own, pins = parse_mesh(mesh), PINS[mesh]
    made = device_mesh(own.shape, own.axis_names)
    return autopar.compile(net(), made, args=(batch(),), cluster="free-links", pins=pins)


def on_ranks(name: str, mesh: str) -> list[float]:
    """Losses; after half of the steps all state is read into another model, under another plan."""
    model = compiled(mesh)
    optimizer = autopar.step_on_whole(MADE[name](model.parameters()))
    optimizer.register_step_pre_hook(lambda *_: [p.mul_(0.9) for p in map(detached, model.parameters())] and None)
    torch.manual_seed(2)
    losses = [stepped(model, optimizer) for _ in range(STEPS // 2)]
    drawn = torch.get_rng_state()
    weights, state = model.full_state_dict(), copy.deepcopy(model.full_optimizer_state_dict(optimizer))
    other = compiled("b=4")
    other.load_state_dict(weights)
    torch.set_rng_state(drawn)
    resumed = autopar.step_on_whole(MADE[name](other.parameters()))
    resumed.load_state_dict(state)
    resumed.register_step_pre_hook(lambda *_: [p.mul_(0.9) for p in map(detached, other.parameters())] and None)
    return losses + [stepped(other, resumed) for _ in range(STEPS // 2)]


@pytest.mark.multirank
@pytest.mark.parametrize("name", MADE)
def test_updates_of_whole_weights_are_those_of_one_device(ranks4: Ranks, name: str) -> None:
    expected = on_one_device(name)
    for losses in ranks4.run(on_ranks, name, "a=2,b=2"):
        assert losses == pytest.approx(expected, rel=1e-6)


class Noise(torch.optim.Optimizer):
    """Adds noise."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data += torch.randn(p.shape)


def with_noise() -> tuple[torch.Tensor, bool]:
    """A parameter after a step, by other seeds, and whether the state of the generator is as it was."""
    x = nn.Parameter(distribute_tensor(torch.zeros(5, 3), device_mesh((4,), ("a",)), [Shard(0)]))
    optimizer = autopar.step_on_whole(Noise([x]))
    torch.manual_seed(torch.distributed.get_rank())
    before = torch.get_rng_state()
    optimizer.step()
    return x.full_tensor().detach(), torch.equal(before, torch.get_rng_state())


@pytest.mark.multirank
def test_random_numbers_are_the_first_ranks_and_others_keep_their_state(ranks4: Ranks) -> None:
    torch.manual_seed(0)
    expected = torch.randn(5, 3)
    for rank, (found, is_kept) in enumerate(ranks4.run(with_noise)):
        assert torch.equal(found, expected) and is_kept == (rank > 0)


def test_a_step_that_was_replaced_is_refused() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(AutoparError, match="step_on_whole: the step of this SGD was replaced before"):
        autopar.step_on_whole(optimizer)
