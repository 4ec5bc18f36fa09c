"""A copy of a model without its data: what is traced, and what becomes the sharded module."""

import copy

import torch
from torch import nn


def skeleton(model: nn.Module) -> nn.Module:
    """Deep copy of `model` whose parameters and buffers are plain tensors on the meta device; ties are kept, no data is copied.

    Raises whatever `copy.deepcopy` raises for attributes that cannot be copied.
    """
    empty: dict[int, object] = {}
    for parameter in model.parameters():
        empty[id(parameter)] = nn.Parameter(_bare(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        empty[id(buffer)] = _bare(buffer)
    return copy.deepcopy(model, empty)


def _bare(x: torch.Tensor) -> torch.Tensor:
    # not empty_like: of a DTensor that would be a DTensor
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
