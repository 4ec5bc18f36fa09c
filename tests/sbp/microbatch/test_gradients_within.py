"""Gradients that a forward takes of its own samples, in microbatches, are those of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sbp.microbatch.test_microbatch_graph import check


class Penalised(nn.Module):
    """A penalty on the gradient with respect to images, through averages."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad = True
        pooled = F.avg_pool2d(F.silu(self.conv(x)), 2).tanh()
        score = self.head(F.adaptive_avg_pool2d(pooled, 1).flatten(1))
        (g,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return F.softplus(-score).mean() + g.square().flatten(1).sum(1).mean()


class Adversarial(nn.Module):
    """Samples moved by the gradient of a mean over targets, some of which are ignored."""

    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        self.body, self.head, self.weight = nn.Conv2d(3, 8, 1), nn.Linear(8, 4), weight

    def loss(self, h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h.mean((2, 3)).tanh()), target, self.weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.body(x)
        loss = self.loss(h, target)
        (g,) = torch.autograd.grad(loss, h, retain_graph=True)
        return loss + self.loss(h + 9 * g, target)


TARGET = torch.tensor([3, -100, 0, 1, -100, -100, 2, 0])


@pytest.mark.parametrize("model", [Penalised(), Adversarial(), Adversarial(torch.arange(1.0, 5.0).double())])
def test_they_are_those_of_the_whole_batch(model: nn.Module) -> None:
    torch.manual_seed(0)
    check(model.double(), (torch.randn(8, 3, 4, 4).double(), TARGET), {}, counts=(2, 4))
