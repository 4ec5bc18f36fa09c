"""Softmax, log-softmax and logsumexp with reduced dims split over ranks."""

import math
from collections.abc import Sequence

import torch

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import has_backward, local_input_shape, role_axes, sum_dtype
from autopar.sbp.local_ops._reductions import max_over, sum_over
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.sbp.placement import I, Placement, R
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy


def softmax(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, reduced: Sequence[Axis]) -> torch.Tensor:
    """aten.softmax; a row of only -inf gives nan, as in ATen."""
    exponents, _, total = _exponents(self, [dim], dtype, reduced, R)
    return (exponents.exp() / total).to(dtype or self.dtype)


def safe_softmax(
    self: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, reduced: Sequence[Axis]
) -> torch.Tensor:
    """aten._safe_softmax: a row of only -inf gives zeros."""
    exponents, _, total = _exponents(self, [dim], dtype, reduced, R)
    return (exponents.exp() / torch.where(total == 0, 1.0, total)).to(dtype or self.dtype)


def log_softmax(
    self: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, reduced: Sequence[Axis]
) -> torch.Tensor:
    """aten.log_softmax."""
    exponents, _, total = _exponents(self, [dim], dtype, reduced, R)
    return (exponents - total.log()).to(dtype or self.dtype)


def logsumexp(
    self: torch.Tensor, dim: Sequence[int], keepdim: bool = False, *, reduced: Sequence[Axis]
) -> torch.Tensor:
    """aten.logsumexp; the result is whole on the ranks of `reduced`."""
    dims = list(dim) or list(range(self.ndim))
    _, top, total = _exponents(self, dims, None, reduced, I)
    out = (total.log() + top).to(self.dtype)
    return out if keepdim else out.squeeze(dims)


def _exponents(
    x: torch.Tensor, dims: Sequence[int], dtype: torch.dtype | None, axes: Sequence[Axis], dst: Placement
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x - top, top, sum of exp(x - top) over `dims` and all ranks),
    where top is the maximum, or 0 if that is infinite.
    """
    x = x.to(sum_dtype(dtype or x.dtype))
    top = max_over(x.amax(tuple(dims), keepdim=True), axes)
    top = torch.where(top.isinf(), 0.0, top)
    exponents = x - top
    return exponents, top, sum_over(exponents.exp().sum(tuple(dims), keepdim=True), axes, dst)


def _row_bytes(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...], dims: Sequence[int]) -> int:
    """Bytes of one number for each row, that is for each element of the dims that are not reduced."""
    shape = local_input_shape(op, strategy, 0, mesh_shape)
    reduced = {dim % len(shape) for dim in dims} or set(range(len(shape)))
    return (
        math.prod(size for dim, size in enumerate(shape) if dim not in reduced) * sum_dtype(_result_dtype(op)).itemsize
    )


def _result_dtype(op: Op) -> torch.dtype:
    return arguments_of(op).get("dtype") or op.inputs[0].dtype


def _softmax_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The collectives of a softmax: the maximum, the sum and the sum's gradient."""
    size = _row_bytes(op, strategy, mesh_shape, [arguments_of(op)["dim"]])
    phases = ("forward", "forward", "backward") if has_backward(op) else ("forward", "forward")
    return tuple(
        Collective("all_reduce", (axis,), size, phase)
        for phase in phases
        for axis in role_axes(strategy, "reduced", mesh_shape)
    )


def _logsumexp_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The collectives of logsumexp: the maximum and the sum."""
    size = _row_bytes(op, strategy, mesh_shape, arguments_of(op)["dim"])
    axes = role_axes(strategy, "reduced", mesh_shape)
    return tuple(Collective("all_reduce", (axis,), size, "forward") for _ in range(2) for axis in axes)


LOCAL_OPS = {
    "aten.softmax.int": LocalOp(softmax, _softmax_collectives),
    "aten._safe_softmax.default": LocalOp(safe_softmax, _softmax_collectives),
    "aten.log_softmax.int": LocalOp(log_softmax, _softmax_collectives),
    "aten.logsumexp.default": LocalOp(logsumexp, _logsumexp_collectives),
}
