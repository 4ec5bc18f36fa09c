"""Values of small tensors of an example, by which branches are decided, told by tensors without data."""

from typing import Any

import torch
from torch import nn

# Larger tensors are not looked at: masks, positions and lengths decide branches, not images.
MOST_ELEMENTS = 1 << 22
_VALUE = "_autopar_value"


def keep_value(bare: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`bare`, a tensor on the meta device, that tells the values of `x` if it is small."""
    if x.numel() <= MOST_ELEMENTS and not x.is_meta:
        setattr(bare, _VALUE, x.detach())
    return bare


def stands_for(x: torch.Tensor) -> torch.Tensor:
    """The tensor whose values `x` tells, or itself."""
    return getattr(x, _VALUE, x)


def value_of(x: Any) -> torch.Tensor | None:
    """A copy on the CPU of what `x` is or stands for; None without values."""
    x = stands_for(x)
    is_plain = isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, nn.Buffer) and not x.is_meta
    return x.detach().to("cpu", copy=True) if is_plain and x.numel() <= MOST_ELEMENTS else None
