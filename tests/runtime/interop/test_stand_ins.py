"""What a script does to a compiled model before its first call is in the model that is sharded then."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autopar
from autopar.errors import AutoparError
from tests.workers import Ranks, device_mesh


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.table(tokens)).tanh()).square().mean()


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.fill_(0.1 * number - 0.2)
        parameter[0] = 0.3


def reset(model: nn.Module) -> None:
    model.up.reset_parameters()


def replace(model: nn.Module) -> None:
    model.up.weight = nn.Parameter(torch.full((8, 8), 0.3))
    model.down = nn.Linear(8, 8)
    model(torch.arange(8))  # the optimizer is made after it


@torch.no_grad()
def copy_out(model: nn.Module) -> None:
    """As peft copies an adapter, and transformers resizes an embedding."""
    up, table = nn.Linear(8, 8), nn.Embedding(12, 8)
    up.load_state_dict(model.up.state_dict())
    up.weight.data.copy_(model.down.weight.data)
    table.weight[:8] = model.table.weight.data
    model.up, model.table = up, table
    model(torch.arange(8))  # the optimizer is made after it


def tie(model: nn.Module) -> None:
    model.down.weight = model.table.weight


def assign(model: nn.Module) -> None:
    torch.manual_seed(3)
    model.load_state_dict(Mlp().double().state_dict(), assign=True)


@torch.no_grad()
def set_data(model: nn.Module) -> None:
    model.up.weight.data = model.up.weight.data * 2
    model.up.bias.data.fill_(0.5)


def on_a_device(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    fill(model)


def copied(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    fill(made)
    return made


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "no_grad": fill,
    "apply": lambda model: model.apply(initialise),
    "reset": reset,
    "replace": replace,
    "copy_out": copy_out,
    "tie": tie,
    "assign": assign,
    "data": set_data,
    "double": lambda model: model.double(),
    "freeze": lambda model: model.table.requires_grad_(False),
    "copy": copied,
    "to_empty": on_a_device,
}


def trained(name: str, compiled: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Losses of three steps of the changed model, and its end."""
    torch.manual_seed(0)
    with torch.device("meta" if name == "to_empty" else "cpu"):
        made = Mlp()
    model = compiled(made)
    before = torch.optim.SGD(model.parameters(), 0.5)
    torch.manual_seed(1)
    changed = CHANGES[name](model)
    model = changed if name == "copy" else model
    is_kept = name in ("no_grad", "apply", "reset", "data", "freeze")  # the optimizer's parameters
    optimizer = before if is_kept else torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for _ in range(3):
        loss = model(torch.arange(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = model.state_dict()
    whole = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in state.items()}
    return {"losses": torch.stack(losses), "end": whole}


def on_ranks(name: str) -> dict[str, Any]:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    return trained(name, lambda model: autopar.compile(model, mesh, cluster="free-links"))


@pytest.mark.multirank
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_before_the_first_call_is_that_of_one_device(ranks4: Ranks, name: str) -> None:
    expected = trained(name, lambda model: model)
    for found in ranks4.run(on_ranks, name):
        assert_close(found, expected, rtol=1e-5, atol=1e-6)


def optimizer_in_between() -> None:
    model = autopar.compile(Mlp(), device_mesh((2, 2), ("dp", "tp")), cluster="free-links")
    model.up.weight = nn.Parameter(torch.full((8, 8), 0.3))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(torch.arange(8)).backward()
    with pytest.raises(AutoparError, match=r"'up.weight'.*after the first call"):
        optimizer.step()


@pytest.mark.multirank
def test_optimizer_of_a_parameter_that_was_set_in_between_is_refused(ranks4: Ranks) -> None:
    ranks4.run(optimizer_in_between)


def with_stages(by_hand: bool) -> dict[str, Any]:
    mesh = device_mesh((2, 2), ("pp", "dp"))
    torch.manual_seed(0)
    model = autopar.compile(Mlp(), mesh, cluster="free-links")
    torch.manual_seed(1)
    if by_hand:
        nn.init.normal_(model.up.weight)
        nn.init.normal_(model.down.weight)
    else:
        model.apply(initialise)
    loss = model.train_step(torch.arange(8))
    return {"loss": loss}


@pytest.mark.multirank
@pytest.mark.parametrize("by_hand", [False, True])
def test_stages_have_what_was_written_before_the_first_step(ranks4: Ranks, by_hand: bool) -> None:
    torch.manual_seed(0)
    model = Mlp()
    torch.manual_seed(1)
    expected = model.apply(initialise)(torch.arange(8)).detach()
    for found in ranks4.run(with_stages, by_hand):
        assert_close(found["loss"], expected)


def updated_in_hooks(is_ranked: bool) -> list[float]:
    """Losses where hooks that are set before the first call update the parameters, until one is removed."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.linspace(-1, 1, 32).view(8, 4)
    if is_ranked:
        model = autopar.compile(model, device_mesh((4,), ("dp",)), cluster="free-links")

    @torch.no_grad()
    def update(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.sub_(p.grad)
        p.grad = None

    removed = [p.register_hook(lambda g: 2 * g) for p in model.parameters()]
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    losses = []
    for number in range(4):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        if number == 1:
            removed[0].remove()
    return losses


@pytest.mark.multirank
def test_hooks_on_gradients_that_are_set_before_the_first_call_stay(ranks4: Ranks) -> None:
    expected = updated_in_hooks(False)
    assert all(found == pytest.approx(expected, rel=1e-4) for found in ranks4.run(updated_in_hooks, True))
