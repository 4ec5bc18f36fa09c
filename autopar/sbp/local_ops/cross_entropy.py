"""Cross-entropy of tokens split over some axes and of classes split over others."""

import math
from collections.abc import Sequence

import torch

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.axis import Axis
from autopar.sbp.convert import all_reduce
from autopar.sbp.local_ops._arguments import (
    Part,
    first_of,
    local_input_shape,
    num_ranks,
    role_axes,
    share_of,
    sum_dtype,
)
from autopar.sbp.local_ops._reductions import max_over, sum_over
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.sbp.placement import I
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy

NONE, MEAN, SUM = 0, 1, 2  # ATen's Reduction


def cross_entropy(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    tokens: Sequence[Axis] = (),
    vocab: Sequence[Axis] = (),
    tokens_part: Part | None = None,
    vocab_part: Part | None = None,
) -> torch.Tensor:
    """aten.cross_entropy_loss; split over `tokens`, a mean is a term of the pending sum; over `vocab`, it is whole."""
    if not vocab and target.ndim == self.ndim:  # targets are probabilities: the mean is over all tokens
        mean = torch.ops.aten.cross_entropy_loss(self, target, weight, reduction, ignore_index, label_smoothing)
        return mean / num_ranks(tokens) if tokens_part is None else mean * share_of(tokens, tokens_part)
    if vocab:
        num_own = self.shape[min(1, self.ndim - 1)]
        num_classes = vocab_part[0] if vocab_part else num_own * num_ranks(vocab)
        first = first_of(vocab, vocab_part, num_own)
        terms = _token_losses(self, target, weight, ignore_index, label_smoothing, vocab, (first, num_classes))
        total = terms if reduction == NONE else terms.sum()
    else:
        total = torch.ops.aten.cross_entropy_loss(self, target, weight, SUM, ignore_index, label_smoothing)
    if reduction == MEAN:
        total = total / _total_weight(target, weight, ignore_index, sum_dtype(self.dtype), tokens)
    return total.to(self.dtype)


def nll_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    *,
    tokens: Sequence[Axis],
    tokens_part: Part | None = None,
) -> torch.Tensor:
    """aten.nll_loss_nd with the mean over tokens that are split over `tokens`: a term of the pending sum."""
    total = torch.ops.aten.nll_loss_nd(self, target, weight, SUM, ignore_index)
    return (total / _total_weight(target, weight, ignore_index, sum_dtype(self.dtype), tokens)).to(self.dtype)


def _token_losses(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    vocab: Sequence[Axis],
    place: tuple[int, int],
) -> torch.Tensor:
    """The loss of each token, in the shape of `target`; `logits`: of this rank's classes, `weight`: of all classes.

    `place`: the first of this rank's classes, and the number of all.

    With t = max, s = sum_c exp(x_c - t):  -log softmax(x)_c = log s - (x_c - t); the smoothed part is its weighted sum
    over c.
    """
    x = logits.movedim(min(1, logits.ndim - 1), -1).to(sum_dtype(logits.dtype))
    first, num_classes = place
    weights = x.new_ones(num_classes) if weight is None else weight.to(x.dtype)
    x = x - max_over(x.amax(-1, keepdim=True), vocab)
    rows = [x.exp().sum(-1), _pick(x, target - first)]
    if label_smoothing:
        rows.append((x * weights[first : first + x.shape[-1]]).sum(-1))
    sums = sum_over(torch.stack(rows), vocab, I)
    log_total = sums[0].log()
    is_counted = target != ignore_index
    loss = (log_total - sums[1]) * weights[target.where(is_counted, 0)]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing / num_classes * (log_total * weights.sum() - sums[2])
    return loss.where(is_counted, 0.0)


def _pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[..., index] where the index is among this rank's classes, else 0."""
    is_here = (index >= 0) & (index < x.shape[-1])
    return x.gather(-1, index.where(is_here, 0).unsqueeze(-1)).squeeze(-1).where(is_here, 0.0)


def _total_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype, tokens: Sequence[Axis]
) -> torch.Tensor:
    """The number of tokens that are not ignored on all ranks, each counted by its class weight."""
    is_counted = target != ignore_index
    counts = (
        is_counted.to(dtype) if weight is None else weight.to(dtype)[target.where(is_counted, 0)].where(is_counted, 0.0)
    )
    total = counts.sum()
    for axis in tokens:
        total = all_reduce(total, axis) if axis.size > 1 else total
    return total


def _cross_entropy_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The collectives: for split classes the maximum and the stacked sums, for split tokens the count of a mean."""
    arguments = arguments_of(op)
    shape = local_input_shape(op, strategy, arguments["target"].index, mesh_shape)
    size = math.prod(shape) * sum_dtype(op.inputs[0].dtype).itemsize
    num_rows = 3 if arguments["label_smoothing"] else 2
    axes = role_axes(strategy, "vocab", mesh_shape)
    collectives = [Collective("all_reduce", (axis,), size * rows, "forward") for rows in (1, num_rows) for axis in axes]
    return (*collectives, *_count_collectives(op, strategy, mesh_shape))


def _count_collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    logits, target = (op.inputs[arguments_of(op)[name].index] for name in ("self", "target"))
    if len(logits.shape) == len(target.shape):
        return ()
    size = sum_dtype(logits.dtype).itemsize
    return tuple(
        Collective("all_reduce", (axis,), size, "forward") for axis in role_axes(strategy, "tokens", mesh_shape)
    )


LOCAL_OPS = {
    "aten.cross_entropy_loss.default": LocalOp(
        cross_entropy, _cross_entropy_collectives, frozenset(("tokens", "vocab"))
    ),
    "aten.nll_loss_nd.default": LocalOp(nll_loss, _count_collectives, frozenset(("tokens",))),
}
