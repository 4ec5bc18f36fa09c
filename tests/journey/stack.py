"""The model that most cases vary: equal blocks one behind the other, which can be cut into stages, and a loss."""

from collections.abc import Callable

import torch
from torch import nn

BATCH, WIDTH = 8, 8


class Block(nn.Module):
    """A layer of two products beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    """`depth` blocks; the loss is the mean squared difference of what comes out and `y`. Two stages take three blocks:
    the first is like no other, as its input needs no gradient.
    """

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - y).square().mean()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """What the blocks make of `x`."""
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its targets."""
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
