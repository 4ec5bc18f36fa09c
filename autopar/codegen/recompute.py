"""Regions that backward runs again, so that only what enters them is kept."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

Tensors = tuple[torch.Tensor, ...]


def recomputed(function: Callable[..., Tensors], *inputs: torch.Tensor) -> Tensors:
    """`function(*inputs)`, of which autograd keeps the inputs only; backward runs it again, once, to the end.

    To the end, so that every collective of it is issued again on every rank, as is priced. No random state is kept: a program's random ops
    have seeds of their own (`random.seeded`).
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, early_stop=False)
