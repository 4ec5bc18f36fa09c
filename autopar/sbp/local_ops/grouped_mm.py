"""Grouped matrix products with rows or groups split over ranks, and what belongs to the group of each row."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir.graph import Op, resolve
from autopar.sbp.axis import Axis
from autopar.sbp.exchange import exchange_collectives, from_experts, route_by, to_experts
from autopar.sbp.local_ops._arguments import num_ranks, rank_index
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import EXCHANGES, Strategy


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


def exchanged_mm(
    target: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    *args: Any,
    dispatch: Sequence[Axis] = (),
    between: Sequence[Axis] = (),
    combine: Sequence[Axis] = (),
    **kwargs: Any,
) -> torch.Tensor:
    """The product of the rows of this rank's experts with their weights; `offs` are those of the rank's own rows.

    `dispatch`: x has the rank's own rows, which are sent to their experts first; `combine`: those of the product are
    sent back.
    """
    route = route_by(offs, (*dispatch, *between, *combine), x.shape[0], is_checked=bool(dispatch))
    product = resolve(target)(to_experts(x, route) if dispatch else x, weight, route.offs, *args, **kwargs)
    return from_experts(product, route) if combine else product


def _run(target: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    run = exchanged_mm if kwargs.keys() & EXCHANGES else grouped_mm
    return run(target, *args, **kwargs)


def index(table: torch.Tensor, indices: Sequence[torch.Tensor], *, between: Sequence[Axis]) -> torch.Tensor:
    """aten.index of the `table` of this rank's experts, for the rows that they have of all ranks, whose ids of experts
    are sorted on each.
    """
    (keys,) = indices
    ends = torch.arange(1, table.shape[0] * num_ranks(between) + 1, dtype=keys.dtype, device=keys.device)
    route = route_by(torch.searchsorted(keys, ends, out_int32=True), between, keys.shape[0])
    counts = F.pad(route.offs, (1, 0)).diff()
    return table.repeat_interleave(counts, 0, output_size=route.num_rows)


def _collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    table = op.inputs[0 if op.target == "aten.index.Tensor" else 1]
    return exchange_collectives(op, strategy, mesh_shape, table.shape[0])


TARGETS = (
    "aten._grouped_mm.default",
    "transformers.grouped_mm_fallback.default",
    "autopar.turned_grouped_mm.default",
    "autopar.turned_grouped_mm_fallback.default",
    "autopar.grouped_linear.default",
)

LOCAL_OPS = {target: LocalOp(partial(_run, target), _collectives) for target in TARGETS} | {
    "aten.index.Tensor": LocalOp(index, _collectives)
}
