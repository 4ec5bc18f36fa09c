"""Inputs of the models written by hand: `BATCH` samples each."""

from itertools import pairwise

import torch
from torch import nn

BATCH = 8
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def image(size: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randn(BATCH, channels, size, size)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape)


def ids(*shape: int, of: int = 32) -> torch.Tensor:
    return torch.randint(0, of, (BATCH, *shape))


def some(*shape: int, share: float = 0.6) -> torch.Tensor:
    """Booleans, of which about `share` are true, the first of each row always."""
    mask = torch.rand(BATCH, *shape) < share
    mask[..., 0] = True
    return mask


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.SiLU()]
    return nn.Sequential(*layers[:-1])
