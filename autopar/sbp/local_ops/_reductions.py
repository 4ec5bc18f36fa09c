"""Sums, maxima and moments over the ranks of several axes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.sbp.axis import Axis
from autopar.sbp.convert import all_reduce, convert
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


def moments(
    x: torch.Tensor, dims: Sequence[int], axes: Sequence[Axis], sizes: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance over `dims` and over the parts on all ranks, dims kept.

    `sizes`: of all ranks' parts, in row-major order; () if they are equal.

    Each axis gathers the ranks' two moments in one collective and pools them (Chan, Golub, LeVeque 1979): sums of x and
    of x * x would lose the variance to cancellation where the mean is large.
    """
    mean = x.mean(tuple(dims), keepdim=True)
    variance = (x - mean).square().mean(tuple(dims), keepdim=True)
    left = torch.tensor(sizes, dtype=x.dtype).view([axis.size for axis in axes]) if sizes else None
    for axis in axes:
        means, variances = convert(torch.stack([mean, variance]).unsqueeze(0), axis, S(0), R).unbind(1)
        weights = None if left is None else _weights(left, axes, axis).view(-1, *[1] * x.ndim).to(x.device)
        mean = _pooled(means, weights)
        variance = _pooled(variances + (means - mean).square(), weights)
        left = None if left is None else left.sum(0)
    return mean, variance


def _weights(left: torch.Tensor, axes: Sequence[Axis], axis: Axis) -> torch.Tensor:
    """The shares of the ranks of `axis` in what they pool; `left`: elements by rank of this axis and those after it."""
    inner = tuple(one.index for one in axes[list(axes).index(axis) + 1 :])
    own = left[(slice(None), *inner)]
    return own / own.sum()


def _pooled(terms: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return terms.mean(0) if weights is None else (terms * weights).sum(0)
