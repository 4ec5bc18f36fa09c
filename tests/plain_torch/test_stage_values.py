"""Models that keep something in `forward` which modules of another stage read: a stage would not have it."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import PlanError
from tests.plain_torch.test_export_stages import check, of_model
from tests.zoo import Case


class Kept(nn.Module):
    """What blocks share beside the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None
        self.factor, self.calls = 1.0, 0


class Block(nn.Module):
    """A block that knows the model, and does what `reads` and `keeps` say."""

    def __init__(self, number: int, model: "Keeps") -> None:
        super().__init__()
        self.number, self.around, self.calls = number, [model], 0
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        model = self.around[0]
        y = x + self.down(self.up(x).relu())
        return KINDS[model.kind](self, model, y)


class Keeps(nn.Module):
    """Four blocks after a projection."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kept, self.factor, self.mask = kind, Kept(), 1.0, None
        self.scale, self.plain = nn.Linear(16, 16), nn.LayerNorm(16, elementwise_affine=False)
        self.blocks = nn.ModuleList(Block(number, self) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "by the model":
            self.mask = torch.arange(x.shape[1], device=x.device) % 2 == 0
        if self.kind == "called on arguments":
            x = self.plain(x)
        x = self.scale(x)
        for block in self.blocks:
            x = block(x)
        if self.kind == "called on arguments":
            x = self.plain(x)
        if self.kind == "read by the model":
            x = x * self.factor
        return x.square().mean()


def mask(block: Block, model: Keeps, x: torch.Tensor) -> torch.Tensor:
    if block.number == 0:
        model.kept.mask = torch.arange(x.shape[1], device=x.device) % 2 == 0
    return x * model.kept.mask[:, None] if block.number == 3 else x


def stale_mask(block: Block, model: Keeps, x: torch.Tensor) -> torch.Tensor:
    if model.kept.mask is None:
        model.kept.mask = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
    return mask(block, model, x) if block.number in (0, 3) else x


def number(block: Block, model: Keeps, x: torch.Tensor) -> torch.Tensor:
    if block.number == 0:
        model.kept.factor = 2.0
    return x * model.kept.factor if block.number == 3 else x


def on_the_model(block: Block, model: Keeps, x: torch.Tensor) -> torch.Tensor:
    if block.number == 0:
        model.factor = 2.0
    return x * model.factor if block.number == 3 and model.kind != "read by the model" else x


def on_a_sibling(block: Block, model: Keeps, x: torch.Tensor) -> torch.Tensor:
    if block.number == 0:
        model.blocks[2].calls = 3
    return x * (1 + block.calls)


def unread(block: Block, model: Keeps, x: torch.Tensor) -> torch.Tensor:
    """A counter that every hundredth call asks."""
    if block.number == 0:
        model.kept.calls += 1
    return x * 2 if block.number == 3 and model.kept.calls % 100 == 0 else x


def of_the_model(block: Block, model: Keeps, x: torch.Tensor) -> torch.Tensor:
    return x * model.mask[:, None]


KINDS = {
    "a mask": mask,
    "a stale mask": stale_mask,
    "a number": number,
    "on the model": on_the_model,
    "read by the model": on_the_model,
    "on a sibling": on_a_sibling,
    "unread": unread,
    "by the model": of_the_model,
    "called on arguments": lambda block, model, x: x,
}
REFUSED = {
    "a mask": "kept.mask",
    "a stale mask": "kept.mask",
    "a number": "kept.factor",
    "on the model": "factor",
    "read by the model": "factor",
    "on a sibling": "blocks.2.calls",
    "unread": "kept.calls",
}


def made(kind: str) -> tuple[Keeps, torch.Tensor]:
    torch.manual_seed(0)
    return Keeps(kind).double(), torch.randn(8, 6, 16, dtype=torch.float64)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_one_stage_keeps_and_another_reads_is_refused_by_name(kind):
    model, x = made(kind)
    with pytest.raises(PlanError, match=rf"forward changes {REFUSED[kind]}\b"):
        of_model(model, x)


@pytest.mark.parametrize("kind", ["by the model", "called on arguments"])
def test_what_a_stage_keeps_for_itself_is_exported(kind):
    model, x = made(kind)
    check(of_model(model, x).text, Case(model, (x,), {}, lambda loss: loss))
