"""Grouped matrix products with rows or groups split over ranks."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir.graph import resolve
from autopar.sbp.convert import Axis
from autopar.sbp.local_ops._arguments import no_collectives, rank_index
from autopar.sbp.local_ops.local_op import LocalOp


def grouped_mm(
    target: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    *args: Any,
    rows: Sequence[Axis] = (),
    experts: Sequence[Axis] = (),
    **kwargs: Any,
) -> torch.Tensor:
    """Rows offs[e - 1] to offs[e] of x [t, k] times weight[e] [k, n]; `rows` split t, `experts` split e.

    Split over `experts` the result is a term of the pending sum, zero in the rows of other ranks' experts; the offsets
    of this rank's rows are read from the device. A rank without peers (a dry run, possibly on the meta device) takes
    its share of all rows.
    """
    offs = (offs - rank_index(rows) * x.shape[0]).clamp(0, x.shape[0])
    if not experts:
        return resolve(target)(x, weight, offs, *args, **kwargs)
    first = rank_index(experts) * weight.shape[0]
    bounds = F.pad(offs, (1, 0))[first : first + weight.shape[0] + 1]
    if experts[0].group is None:  # a dry run does not know the counts: every expert gets the same number of rows
        start, end = 0, x.shape[0] // math.prod(axis.size for axis in experts)
    else:
        start, end = bounds[[0, -1]].tolist()
    product = resolve(target)(x[start:end], weight, bounds[1:] - start, *args, **kwargs)
    return F.pad(product, (0, 0, start, x.shape[0] - end))


TARGETS = (
    "aten._grouped_mm.default",
    "transformers.grouped_mm_fallback.default",
    "autopar.turned_grouped_mm.default",
    "autopar.turned_grouped_mm_fallback.default",
)

LOCAL_OPS = {target: LocalOp(partial(grouped_mm, target), no_collectives) for target in TARGETS}
