"""Means over a dim that is split."""

from typing import Any

import torch

from autopar.ir.graph import resolve
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import Part, no_collectives, num_ranks, share_of
from autopar.sbp.local_ops.local_op import LocalOp


def _mean(target: str) -> LocalOp:
    def run(*args: Any, mean: tuple[Axis, ...], mean_part: Part | None = None, **kwargs: Any) -> torch.Tensor:
        """A term of the pending sum: the local mean times this rank's share of the elements."""
        own = resolve(target)(*args, **kwargs)
        return own / num_ranks(mean) if mean_part is None else own * share_of(mean, mean_part)

    return LocalOp(run, no_collectives, frozenset(("mean",)))


LOCAL_OPS = {target: _mean(target) for target in ("aten.mean.default", "aten.mean.dim")}
