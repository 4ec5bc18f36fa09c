"""What a forward leaves in attributes: caches of eval mode that `train()` empties are taken, others are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model

X = torch.randn(3, 4, dtype=torch.float64)


class Cached(nn.Module):
    """LeViT's attention: biases are looked up once in eval mode, and anew after training."""

    def __init__(self, held: Callable[["Cached", torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.biases, self.scale = nn.Parameter(torch.randn(5)), nn.Linear(4, 4)
        self.register_buffer("at", torch.tensor([4, 0, 2, 2]))
        self.register_buffer("mean", torch.zeros(4))
        self.held, self.cache = held or (lambda module, x: module.biases[module.at]), {}
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.scale(x) + self.held(self, x)
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.held(self, x)
        return self.scale(x) + self.cache["cpu"]


class Emptied(Cached):
    def train(self, mode: bool = True) -> "Emptied":
        super().train(mode)
        if mode and self.cache:
            self.cache = {}
        return self


def test_a_cache_that_train_empties_is_computed_in_each_call() -> None:
    model = Emptied().eval()
    graph = trace(model, (X,), {})
    assert model.cache == {} and not model.training and not model.scale.training
    assert_same_as_model(graph, model, (X,), {})


def of_the_call(module: Cached, x: torch.Tensor) -> torch.Tensor:
    return x.mean(0)


def of_a_buffer(module: Cached, x: torch.Tensor) -> torch.Tensor:
    return module.mean + module.biases[module.at]


@pytest.mark.parametrize(
    "model", [Cached(), Emptied(of_the_call), Emptied(of_a_buffer)], ids=["kept", "call", "buffer"]
)
def test_what_another_call_would_find_there_is_refused(model: nn.Module) -> None:
    with pytest.raises(TraceError, match="the forward keeps state in attribute cache"):
        trace(model.eval(), (X,), {})
