"""A copy of a model without its data: what is traced, and what becomes the sharded module."""

import copy

import torch
from torch import nn


def skeleton(model: nn.Module) -> nn.Module:
    """Deep copy of `model` whose parameters and buffers are on the meta device; ties are kept, no data is copied.

    Raises whatever `copy.deepcopy` raises for attributes that cannot be copied.
    """
    empty: dict[int, object] = {}
    for parameter in model.parameters():
        empty[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        empty[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, empty)
