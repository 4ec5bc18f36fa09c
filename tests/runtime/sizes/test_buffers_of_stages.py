"""Calls of other sizes in stages: a branch on a buffer that another rank holds goes as it went at first."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


class Layer(nn.Module):
    """Scales features picked by a mask, once it has started."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("started", torch.tensor([True]))
        self.register_buffer("mask", torch.arange(8) % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outer(self.inner(x).relu())
        if self.started:
            y = y * 2
        even, odd = y[:, self.mask], y[:, ~self.mask]
        return x + torch.cat([even * 3, odd.tanh()], 1)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def steps() -> None:
    torch.manual_seed(0)
    truth = Stacked().double()
    batches = [torch.randn(rows, 8, dtype=torch.float64) for rows in (8, 12, 4)]
    model = autopar.compile(
        copy.deepcopy(truth), device_mesh((2, 2), ("pp", "dp")), args=(batches[0],), cluster="free-links"
    )
    for x in batches:
        expected = truth(x)
        expected.backward()
        torch.testing.assert_close(model.train_step(x), expected.detach())
    gradients = {fqn: p.grad.full_tensor() for fqn, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    assert gradients
    for fqn, gradient in gradients.items():
        torch.testing.assert_close(gradient, truth.get_parameter(fqn).grad)


def test_a_buffer_of_another_stage_decides_again(ranks4: Ranks) -> None:
    ranks4.run(steps)
