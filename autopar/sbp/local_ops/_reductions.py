"""Sums, maxima and moments over the ranks of several axes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.sbp.convert import Axis, all_reduce, convert
from autopar.sbp.placement import P, Placement, R, S


def max_over(x: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Elementwise maximum of `x` over the ranks of `axes`, without gradient."""
    x = x.detach()
    for axis in axes:
        x = all_reduce(x, axis, dist.ReduceOp.MAX) if axis.size > 1 else x
    return x


def sum_over(x: torch.Tensor, axes: Sequence[Axis], dst: Placement) -> torch.Tensor:
    """Sum of `x` over the ranks of `axes`; `dst` is I if the ops that read it are whole, R if they are split.

    With R the gradient is summed over the ranks.
    """
    for axis in axes:
        x = convert(x, axis, P, dst)
    return x


def moments(x: torch.Tensor, dims: Sequence[int], axes: Sequence[Axis]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance over `dims` and over the equal parts on all ranks, dims kept.

    Each axis gathers the ranks' two moments in one collective and pools them (Chan, Golub, LeVeque 1979): sums of x and
    of x * x would lose the variance to cancellation where the mean is large.
    """
    mean = x.mean(tuple(dims), keepdim=True)
    variance = (x - mean).square().mean(tuple(dims), keepdim=True)
    for axis in axes:
        means, variances = convert(torch.stack([mean, variance]).unsqueeze(0), axis, S(0), R).unbind(1)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
    return mean, variance
