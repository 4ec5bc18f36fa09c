"""A copy of a model without its data: what is traced, and what becomes the sharded module."""

import copy

import torch
from torch import nn


def skeleton(model: nn.Module) -> nn.Module:
    """Deep copy of `model` whose parameters and buffers are plain tensors on the meta device; ties are kept, no data is
    copied.

    Raises whatever `copy.deepcopy` raises for attributes that cannot be copied.
    """
    empty: dict[int, object] = {id(x): bare(x) for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, empty)


def bare(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor or parameter like `x` without data."""
    # not empty_like: of a DTensor that would be a DTensor
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty
