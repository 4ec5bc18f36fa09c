"""Losses that are means over elements split over ranks, divided by the global number of elements."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from autopar.ir.graph import resolve
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import Part, no_collectives, num_ranks, share_of
from autopar.sbp.local_ops.local_op import LocalOp


def mean_loss(
    loss: Callable[..., torch.Tensor], *args, elements: Sequence[Axis], elements_part: Part | None = None, **kwargs
) -> torch.Tensor:
    """The local mean times this rank's share of the elements: a term of the pending sum that is the global mean."""
    mean = loss(*args, **kwargs)
    return mean / num_ranks(elements) if elements_part is None else mean * share_of(elements, elements_part)


TARGETS = (
    "aten.mse_loss.default",
    "aten.l1_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.soft_margin_loss.default",
    "aten.kl_div.default",
    "aten.margin_ranking_loss.default",
    "aten.hinge_embedding_loss.default",
    "aten.poisson_nll_loss.default",
    "aten.cosine_embedding_loss.default",
    "aten.multi_margin_loss.default",
    "aten.multilabel_margin_loss.default",
    "aten.triplet_margin_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_with_logits.default",
)

LOCAL_OPS = {
    target: LocalOp(partial(mean_loss, resolve(target)), no_collectives, frozenset(("elements",))) for target in TARGETS
}
