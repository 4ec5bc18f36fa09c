"""`skeleton`: a copy of a model without data, which is traced."""

import copy

import torch
from torch import nn


def skeleton(model: nn.Module) -> nn.Module:
    """A deep copy of `model` with plain meta tensors for its parameters and buffers; ties are kept, no data is copied.

    Raises the errors of `copy.deepcopy` for attributes that cannot be copied.
    """
    empty: dict[int, object] = {id(x): bare(x) for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, empty)


def bare(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor or parameter like `x` without data."""
    # not empty_like: of a DTensor that would be a DTensor
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty
