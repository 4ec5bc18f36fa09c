"""Parameters whose `requires_grad` the forward sets have the gradients of one device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model

Function = Callable[["Adversarial", Tensor], Tensor]


class Adversarial(nn.Module):
    """A generator's loss behind a critic that is frozen for it, and the critic's own loss."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.made, self.critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def frozen(self, is_frozen: bool) -> None:
        for p in self.critic.parameters():
            p.requires_grad = not is_frozen


def _between(model: Adversarial, x: Tensor) -> Tensor:
    fake = model.made(x)
    of_critic = model.critic(x).mean() - model.critic(fake.detach()).mean()
    model.frozen(True)
    of_maker = -model.critic(fake).mean()
    model.frozen(False)
    return of_critic + of_maker


def _before(model: Adversarial, x: Tensor) -> Tensor:
    model.critic.requires_grad_(False)
    score = model.critic(model.made(x)).square().mean()
    model.critic.requires_grad_(True)
    return score + model.critic(x).mean()


def _of_views(model: Adversarial, x: Tensor) -> Tensor:
    weight = model.critic[0].weight
    turned = weight.t()  # autograd follows what was read before
    model.frozen(True)
    now = weight[:, 0] * turned[0]
    model.frozen(False)
    return (x @ turned).sum() + now.sum() + weight.square().sum()


@pytest.mark.parametrize("function", [_between, _before, _of_views])
def test_no_gradient_reaches_what_is_frozen_meanwhile(function: Function) -> None:
    torch.manual_seed(0)
    model, x = Adversarial(function).double(), torch.randn(6, 4, dtype=torch.float64)
    graph = trace(model, (x,), {})
    assert_same_as_model(graph, model, (x,), {})


def _left_frozen(model: Adversarial, x: Tensor) -> Tensor:
    model.frozen(True)
    return model.critic(model.made(x)).mean()


def _thawed(model: Adversarial, x: Tensor) -> Tensor:
    model.made.bias.requires_grad_(True)
    return model.made(x).sum()


@pytest.mark.parametrize(
    ("function", "words"), [(_left_frozen, "critic.0.weight.*False"), (_thawed, "made.bias.*True")]
)
def test_what_stays_so_after_the_forward_is_refused(function: Function, words: str) -> None:
    model = Adversarial(function)
    model.made.bias.requires_grad_(False)
    with pytest.raises(TraceError, match=f"requires_grad of parameter {words}"):
        trace(model, (torch.randn(6, 4),), {})
