"""Means over a dim that is split."""

from typing import Any

import torch

from autopar.ir.graph import resolve
from autopar.sbp.convert import Axis
from autopar.sbp.local_ops._arguments import no_collectives, num_ranks
from autopar.sbp.local_ops.local_op import LocalOp


def _mean(target: str) -> LocalOp:
    def run(*args: Any, mean: tuple[Axis, ...], **kwargs: Any) -> torch.Tensor:
        """A term of the pending sum: the local mean divided by the number of parts, which are equal."""
        return resolve(target)(*args, **kwargs) / num_ranks(mean)

    return LocalOp(run, no_collectives)


LOCAL_OPS = {target: _mean(target) for target in ("aten.mean.default", "aten.mean.dim")}
