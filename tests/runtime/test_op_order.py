"""Models whose ops come in another order on each rank, as where they loop over a set."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from tests.runtime.training import whole
from tests.workers import Ranks, device_mesh


class Tables(nn.Module):
    """Adds a table for each kind, made in an order of its own on odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kinds = ["near", "far"] if dist.get_rank() % 2 == 0 else ["far", "near"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = {kind: torch.arange(8.0).cos() * (1 + len(kind)) for kind in self.kinds}
        return self.linear(x + tables["near"]) * tables["far"]


def difference() -> float:
    torch.manual_seed(0)
    model, x = Tables(), torch.randn(8, 8)
    truth = copy.deepcopy(model)
    model = autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), args=(x,), cluster="free-links")
    for each in (model, truth):
        each(x).square().sum().backward()
    return max(float((whole(p.grad) - q.grad).abs().max()) for p, q in zip(model.parameters(), truth.parameters()))


@pytest.mark.multirank
def test_ranks_take_the_first_ones_order(ranks4: Ranks) -> None:
    assert max(ranks4.run(difference)) < 1e-3
