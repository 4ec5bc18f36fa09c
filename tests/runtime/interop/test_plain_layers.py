"""Layers around a compiled part whose ranks have other rows each: one device's numbers, or refused by name."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import RankMismatch
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank
ROWS, WIDTH = 8, 6


class Around(nn.Module):
    """Three parts one behind the other, of which some are compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before, self.part, self.behind = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.part(self.before(x)))


def _part(module: nn.Module) -> nn.Module:
    return autopar.compile(module, device_mesh((4,), ("dp",)), batch="local", cluster="cpu")


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _trained(model: nn.Module, rows: slice) -> None:
    """Three steps on these rows of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(3):
        x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        F.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _own_rows() -> slice:
    number = dist.get_rank() * ROWS // 4
    return slice(number, number + ROWS // 4)


def _same_as_one_device(made: Callable[[Around], None]) -> None:
    truth = Around()
    model = copy.deepcopy(truth)
    made(model)
    _trained(truth, slice(None))
    _trained(model, _own_rows())
    expected = [p.detach() for p in truth.parameters()]
    for found, value in zip([_whole(p.detach()) for p in model.parameters()], expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)


def layers_in_ddp() -> None:
    def made(model: Around) -> None:
        model.before, model.behind = DistributedDataParallel(model.before), DistributedDataParallel(model.behind)
        model.part = _part(model.part)

    _same_as_one_device(made)


def compiled_parts() -> None:
    def made(model: Around) -> None:
        for name, child in [*model.named_children()]:
            setattr(model, name, _part(child))

    _same_as_one_device(made)


def frozen_layers() -> None:
    truth = Around()
    for layer in (truth.before, truth.behind):
        layer.requires_grad_(False)
    model = copy.deepcopy(truth)
    model.part = _part(model.part)
    _trained(truth, slice(None))
    _trained(model, _own_rows())
    torch.testing.assert_close(_whole(model.part[0].weight.detach()), truth.part[0].weight.detach())


def refused(kind: str) -> str:
    """The error of a model with a plain layer of this kind."""
    model = Around()
    if kind != "before":
        model.before = nn.Identity()
    if kind != "behind":
        model.behind = nn.Identity()
    model.part = _part(model.part)
    try:
        _trained(model, _own_rows())
    except RankMismatch as error:
        return str(error)
    return "not refused"


def refused_in_an_optimizer_of_its_own() -> str:
    part, head = _part(Around().part), nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(head.named_parameters())
    head(part(torch.randn(ROWS, WIDTH)[_own_rows()])).mean().backward()
    try:
        optimizer.step()
    except RankMismatch as error:
        return str(error)
    return "not refused"


def gradient_penalty() -> None:
    """Of the gradient with respect to each row, as WGAN-GP and R1 have it."""
    truth = Around().part
    model = _part(copy.deepcopy(truth))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

    def penalised(module: nn.Module, rows: slice) -> torch.Tensor:
        own = x[rows].clone().requires_grad_()
        [gradient] = torch.autograd.grad(module(own).sum(), own, create_graph=True)
        loss = (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        return gradient.detach()

    expected = penalised(truth, slice(None))
    torch.testing.assert_close(penalised(model, _own_rows()), expected[_own_rows()])
    for found, p in zip(model.parameters(), truth.parameters(), strict=True):
        if p.grad is not None and p.grad.abs().max() > 0:
            torch.testing.assert_close(_whole(found.grad), p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", [layers_in_ddp, compiled_parts, frozen_layers, gradient_penalty])
def test_as_on_one_device(ranks4: Ranks, case: Callable[[], None]) -> None:
    ranks4.run(case)


@pytest.mark.parametrize("kind", ["before", "behind"])
def test_a_plain_layer_is_refused(ranks4: Ranks, kind: str) -> None:
    for text in ranks4.run(refused, kind):
        assert "the gradient of the optimizer's parameter 0" in text or "parameter 4" in text, text
        assert "wrap the layer in DistributedDataParallel" in text


def test_a_plain_layer_with_an_optimizer_of_its_own_is_refused(ranks4: Ranks) -> None:
    for text in ranks4.run(refused_in_an_optimizer_of_its_own):
        assert text.startswith("the gradient of weight, of shape (1, 6)"), text
