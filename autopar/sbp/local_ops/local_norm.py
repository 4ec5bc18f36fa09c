"""Normalisations whose statistics are over several ranks."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import (
    Part,
    has_backward,
    local_input_shape,
    no_collectives,
    num_ranks,
    role_axes,
    sizes_of,
    sum_dtype,
)
from autopar.sbp.local_ops._reductions import moments, sum_over
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.sbp.placement import R
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
    *,
    normalized: Sequence[Axis],
) -> torch.Tensor:
    """aten.layer_norm with normalised dims split over `normalized`; parameters are split alike."""
    x = input.to(sum_dtype(input.dtype))
    mean, variance = moments(x, range(-len(normalized_shape), 0), normalized)
    return _scale((x - mean) * torch.rsqrt(variance + eps), weight, bias).to(input.dtype)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    normalized: Sequence[Axis],
) -> torch.Tensor:
    """aten.rms_norm with normalised dims split over `normalized`; the weight is split alike."""
    x = input.to(sum_dtype(input.dtype))
    eps = torch.finfo(x.dtype).eps if eps is None else eps  # as in ATen, of the dtype of the computation
    local_mean = x.square().mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
    mean = sum_over(local_mean / num_ranks(normalized), normalized, R)
    return _scale(x * torch.rsqrt(mean + eps), weight, None).to(input.dtype)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    channel_groups: Sequence[Axis],
) -> torch.Tensor:
    """aten.group_norm on this rank's whole groups."""
    return F.group_norm(input, num_groups // num_ranks(channel_groups), weight, bias, eps)


def batch_norm_functional(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *,
    batch: Sequence[Axis],
    batch_part: Part | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten._native_batch_norm_legit_functional in training with the batch split over `batch`.

    Returns output, mean, 1 / std and new running statistics.
    """
    out, mean, variance = _batch_norm(input, weight, bias, eps, batch, batch_part)
    num_rows = batch_part[0] if batch_part else input.shape[0] * num_ranks(batch)
    count = math.prod(input.shape[2:]) * num_rows
    unbiased = variance * (count / (count - 1))
    updated = [
        (1 - momentum) * old + momentum * new.to(old.dtype)
        for old, new in ((running_mean, mean), (running_var, unbiased))
    ]
    statistics = [statistic.to(running_mean.dtype) for statistic in (mean, torch.rsqrt(variance + eps))]
    return out, *statistics, *updated


def batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: None,
    running_var: None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    *,
    batch: Sequence[Axis],
    batch_part: Part | None = None,
) -> torch.Tensor:
    """aten.batch_norm without running statistics, with the batch split over `batch`."""
    return _batch_norm(input, weight, bias, eps, batch, batch_part)[0]


def _batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    batch: Sequence[Axis],
    part: Part | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and the mean and biased variance of each channel, these without gradient."""
    x = input.to(sum_dtype(input.dtype)).movedim(1, -1)
    mean, variance = moments(x, range(x.ndim - 1), batch, sizes_of(batch, part) if part else ())
    out = _scale((x - mean) * torch.rsqrt(variance + eps), weight, bias)
    return out.movedim(-1, 1).to(input.dtype), mean.detach().flatten(), variance.detach().flatten()


def _scale(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _gathered_moments(
    axes: list[int], num_statistics: int, op: Op, mesh_shape: tuple[int, ...]
) -> tuple[Collective, ...]:
    """The collectives of `moments`: an all-gather for each axis, in
    backward a reduce-scatter for each, in reverse order.
    """
    size = 2 * num_statistics * sum_dtype(op.inputs[0].dtype).itemsize
    forward = [Collective("all_gather", (axis,), size * mesh_shape[axis], "forward") for axis in axes]
    backward = [Collective("reduce_scatter", (axis,), size * mesh_shape[axis], "backward") for axis in reversed(axes)]
    return tuple(forward + backward if has_backward(op) else forward)


def _num_rows(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> int:
    shape = local_input_shape(op, strategy, 0, mesh_shape)
    return math.prod(shape[: len(shape) - len(arguments_of(op)["normalized_shape"])])


def _layer_norm_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    axes = role_axes(strategy, "normalized", mesh_shape)
    return _gathered_moments(axes, _num_rows(op, strategy, mesh_shape), op, mesh_shape)


def _rms_norm_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    size = _num_rows(op, strategy, mesh_shape) * sum_dtype(op.inputs[0].dtype).itemsize
    phases = ("forward", "backward") if has_backward(op) else ("forward",)
    axes = role_axes(strategy, "normalized", mesh_shape)
    return tuple(Collective("all_reduce", (axis,), size, phase) for phase in phases for axis in axes)


def _batch_norm_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    num_channels = local_input_shape(op, strategy, 0, mesh_shape)[1]
    return _gathered_moments(role_axes(strategy, "batch", mesh_shape), num_channels, op, mesh_shape)


LOCAL_OPS = {
    "aten.layer_norm.default": LocalOp(layer_norm, _layer_norm_collectives),
    "aten.rms_norm.default": LocalOp(rms_norm, _rms_norm_collectives),
    "aten.group_norm.default": LocalOp(group_norm, no_collectives),
    "aten._native_batch_norm_legit_functional.default": LocalOp(
        batch_norm_functional, _batch_norm_collectives, frozenset(("batch",))
    ),
    "aten.batch_norm.default": LocalOp(batch_norm, _batch_norm_collectives, frozenset(("batch",))),
}
