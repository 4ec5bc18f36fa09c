"""Modules that are registered in several places: their tensors have several names, and one sharded tensor."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autopar
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


class Again(nn.Module):
    """A module under two names, one of them with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.again = self.first
        self.inside = nn.ModuleDict({"norm": self.norm, "last": self.last})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside["last"](self.again(self.norm(self.first(x)).relu())).square().mean()


class Twice(nn.Module):
    """One layer twice in a list, and a list of another module's layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([layer, nn.Linear(8, 8), layer])
        self.reversed = nn.ModuleList(reversed(self.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.reversed):
            x = layer(x).tanh()
        return x.square().mean()


class Recurrent(nn.Module):
    """An LSTM, which keeps its weights in a list besides, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(8, 8, batch_first=True)
        self.decoder = self.encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, last = self.encoder(x.view(4, 2, 8))
        return self.decoder(states, last)[0].square().mean()


def trains_alike(build: Callable[[], nn.Module], at_first_call: bool) -> None:
    torch.manual_seed(0)
    alone, x = build(), torch.randn(8, 8)
    model = copy.deepcopy(alone)
    names = list(model.state_dict())
    example = {} if at_first_call else {"args": (x,)}
    model = autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), cluster="free-links", **example)
    for each in (alone, model):
        optimizer = torch.optim.AdamW(each.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).backward()
            optimizer.step()
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in alone.named_parameters()]
    whole = {name: x.full_tensor() for name, x in model.state_dict().items()}
    assert_close(whole, alone.state_dict(), rtol=1e-3, atol=1e-4)
    copied = copy.deepcopy(model)
    copied.load_state_dict({name: 2 * x for name, x in alone.state_dict().items()}, strict=True)
    assert_close({name: x.full_tensor() for name, x in model.state_dict().items()}, whole)


@pytest.mark.parametrize("at_first_call", [False, True], ids=["at-once", "at-first-call"])
@pytest.mark.parametrize("build", [Again, Twice, Recurrent])
def test_module_in_two_places_trains_as_on_one_device(
    ranks4: Ranks, build: Callable[[], nn.Module], at_first_call: bool
) -> None:
    ranks4.run(trains_alike, build, at_first_call)
