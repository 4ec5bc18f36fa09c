"""Rows exchanged by expert between the ranks of mesh axes, by uneven all-to-alls: expert parallelism.

Every rank has rows sorted by expert. It sends each to the rank that has the row's expert, of which each rank has an
equal part, in order, and receives the rows of its own experts from all ranks, which it sorts by expert again. First the
ranks gather how many rows each has of each expert, so that all know what all send; a rank may receive no row, or all.
Over several axes rows are exchanged on one after the other, the outermost first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.errors import AutoparError
from autopar.ir.graph import Op
from autopar.sbp.axis import Axis
from autopar.sbp.convert import all_gather
from autopar.sbp.in_flight import timed
from autopar.sbp.placement import local_shape
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import BETWEEN, COMBINE, EXCHANGES, Strategy
from autopar.sbp.uneven.dim_parts import DimParts


@dataclass(frozen=True, eq=False)
class _Exchange:
    """The rows that this rank sends to and receives from each rank of `axis`, and the positions of the received ones in
    the order by expert.
    """

    axis: Axis
    num_sent: list[int]
    num_received: list[int]
    order: torch.Tensor


@dataclass(frozen=True, eq=False)
class Route:
    """The exchanges that bring the rows of this rank's experts to it, where `offs[e - 1]` to `offs[e]` are those of its
    expert e.
    """

    exchanges: tuple[_Exchange, ...]
    offs: torch.Tensor

    @property
    def num_rows(self) -> int:
        """The number of rows that this rank has of its experts."""
        return len(self.exchanges[-1].order)


def route_by(offs: torch.Tensor, axes: Sequence[Axis], num_rows: int, *, is_checked: bool = True) -> Route:
    """The route of the rows that are sorted by expert: on this rank `offs[e - 1]` to `offs[e]` are those of expert e.

    `num_rows`: of a rank, all of which must be some expert's, if that `is_checked`. A rank without peers (a dry run)
    gets as many rows as it has.
    """
    exchanges: list[_Exchange] = []
    for axis in axes:
        others = num_rows - offs[-1:] if is_checked and not exchanges else offs.new_zeros(1)
        counts = all_gather(torch.cat((F.pad(offs, (1, 0)).diff(), others.to(offs.dtype)))[None], axis, DimParts(0))
        per_rank = (counts.shape[1] - 1) // axis.size
        of_own = counts[:, axis.index * per_rank : (axis.index + 1) * per_rank]
        if axis.group is None:
            num_sent = num_received = [num_rows] + [0] * (axis.size - 1)
            order = torch.arange(num_rows, device=offs.device)
        else:
            table = counts.tolist()
            _check(table)
            num_sent = [sum(table[axis.index][rank * per_rank :][:per_rank]) for rank in range(axis.size)]
            num_received = [sum(row[axis.index * per_rank :][:per_rank]) for row in table]
            order = _order_by_expert(of_own, sum(num_received))
        exchanges.append(_Exchange(axis, num_sent, num_received, order))
        offs = of_own.sum(0).cumsum(0, dtype=offs.dtype)
    return Route(tuple(exchanges), offs)


def _check(table: list[list[int]]) -> None:
    """Refuse counts that no sorted rows have; all ranks know those of all, so that all stop."""
    for rank, counts in enumerate(table):
        if counts[-1] or min(counts) < 0:
            raise AutoparError(
                f"expert parallelism: on rank {rank} of the axis the experts' counts of rows, {counts[:-1]}, are not"
                f" those of all its rows ({sum(counts)}); every row needs one expert of those that the model counts:"
                " correct the ids of experts that the router gives, or plan without expert parallelism"
            )


def _order_by_expert(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Positions of the rows by expert, of rows by rank and expert; `counts`: [ranks, experts], `num_rows` in all."""
    of_rank = counts.flatten().long()
    firsts = (of_rank.cumsum(0) - of_rank).view_as(counts).T.flatten()
    of_expert = counts.T.flatten().long()
    shifts = firsts - (of_expert.cumsum(0) - of_expert)
    return shifts.repeat_interleave(of_expert, output_size=num_rows) + torch.arange(num_rows, device=counts.device)


def to_experts(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """The rows of this rank's experts, from the rows of each rank; differentiable."""
    for exchange in route.exchanges:
        rows = _Exchanged.apply(rows, exchange, False)
    return rows


def from_experts(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """The inverse of `to_experts`."""
    for exchange in reversed(route.exchanges):
        rows = _Exchanged.apply(rows, exchange, True)
    return rows


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange, is_back):
        ctx.exchange, ctx.is_back = exchange, is_back
        if not is_back:
            received = _all_to_all(rows.contiguous(), exchange.num_sent, exchange.num_received, exchange.axis)
            return received.index_select(0, exchange.order)
        by_rank = rows.new_empty(rows.shape).index_copy_(0, exchange.order, rows)
        return _all_to_all(by_rank, exchange.num_received, exchange.num_sent, exchange.axis)

    @staticmethod
    def backward(ctx, *gradients):
        return _Exchanged.apply(gradients[0], ctx.exchange, not ctx.is_back), None, None


def _all_to_all(rows: torch.Tensor, num_sent: list[int], num_received: list[int], axis: Axis) -> torch.Tensor:
    out = rows.new_empty((sum(num_received), *rows.shape[1:]))
    if axis.group is not None:
        timed(dist.all_to_all_single, out, rows, num_received, num_sent, group=axis.group)
    return out


def exchange_collectives(
    op: Op, strategy: Strategy, mesh_shape: tuple[int, ...], num_experts: int
) -> tuple[Collective, ...]:
    """The collectives of an op with a role of `EXCHANGES`, which exchanges its first input or its output.

    Their bytes are those of balanced experts, which are the mean over the ranks whatever the experts' shares.
    """
    taken = [(axis, one.role) for axis, one in enumerate(strategy.signatures) if one.role in EXCHANGES]
    found = []
    for axis, _ in taken:
        found.append(Collective("all_gather", (axis,), (num_experts + 1) * mesh_shape[axis] * 4, "forward"))
        num_experts //= mesh_shape[axis]
    for axis, role in taken:
        if role == BETWEEN:
            continue
        rows, layout = op.inputs[0], strategy.input_layout(0)
        if role == COMBINE:
            rows, layout = op.outputs[0], strategy.output_layout(0)
        num_bytes = rows.dtype.itemsize
        for size in local_shape(rows.shape, layout, mesh_shape):
            num_bytes *= size
        phases = ("forward", "backward") if rows.needs_grad and op.outputs[0].needs_grad else ("forward",)
        found += [Collective("all_to_all", (axis,), num_bytes, phase) for phase in phases]
    return tuple(found)
