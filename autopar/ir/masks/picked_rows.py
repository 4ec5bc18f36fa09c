"""The op that a mask is in an exported graph, where it picks the rows that a loss or a sum is over."""

from typing import Any

import torch

from autopar.torch_compat import FakeTensor

PICKED = "autopar.picked.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("picked(Tensor mask) -> Tensor[]")


def _picked(mask: torch.Tensor) -> list[torch.Tensor]:
    """The coordinates of the True of `mask`."""
    return list(mask.nonzero(as_tuple=True))


def _unknown_number(mask: torch.Tensor) -> list[torch.Tensor]:
    """A number that may be 0, so that no branch on it is decided; in a graph, that of all elements."""
    size: Any = torch.library.get_ctx().new_dynamic_size(min=0) if isinstance(mask, FakeTensor) else mask.numel()
    return [mask.new_empty(size, dtype=torch.int64) for _ in mask.shape]


_LIBRARY.impl("picked", _picked, "CPU")
_LIBRARY.impl("picked", _picked, "CUDA")
torch.library.register_fake("autopar::picked", _unknown_number, lib=_LIBRARY)
