"""The rows of a report on groups of devices that differ: shares, times and memory of each in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costmodel.cluster.device_groups import ranks_of
from autopar.explain.common_text import table
from autopar.ir.print_graph import printable
from autopar.plans.plan import Plan
from autopar.plans.seen_rank import seen_by_all
from autopar.sbp.placement import format_shares
from autopar.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A row of a group of devices: the rows of the batch of each of its ranks ("" if all have equal parts), and seconds
    and memory of the one with the most. `between_bytes_per_s`: of the link of a device to those of other groups.
    """

    name: str
    num_devices: int
    shares: str
    compute_s: float
    step_s: float
    memory_bytes: int
    device_bytes: int
    between_bytes_per_s: float


def group_rows(plan: Plan) -> tuple[GroupRow, ...]:
    """The rows of the groups of a plan's cluster, () if all devices are alike."""
    if plan.cluster.groups is None:
        return ()
    groups, ranks, rows = plan.cluster.groups, ranks_of(plan.cluster, plan.mesh.shape[0]), []
    for view in seen_by_all(plan.graph, plan.assignment, plan.mesh, plan.cluster, plan.training):
        (count, own), costs = groups.members[view.group], view.costs
        shares = [sizes[rank] for _, sizes in plan.mesh.shares for rank in ranks[view.group]]
        rows.append(
            GroupRow(
                own.name,
                count,
                format_shares(shares) if shares else "",
                costs.compute_forward_s + costs.compute_backward_s,
                costs.step_s,
                costs.total_memory_bytes,
                own.memory_bytes,
                groups.link.bandwidth_bytes_per_s,
            )
        )
    return tuple(rows)


def format_groups(rows: Sequence[GroupRow]) -> str:
    """The table of the groups; "" if there are none."""
    if not rows:
        return ""
    lines = [
        [
            f"{row.num_devices} {printable(row.name)}",
            row.shares or "equal parts",
            format_seconds(row.compute_s),
            format_seconds(row.step_s),
            f"{format_bytes(row.memory_bytes)} of {format_bytes(row.device_bytes)}",
        ]
        for row in rows
    ]
    link = f"{rows[0].between_bytes_per_s / 1e9:.3g} GB/s a device, one direction"
    headers = ["devices", "rows of each rank", "compute", "step", "memory by estimate"]
    return (
        f"Groups of devices, in the order of ranks, joined by {link} (the slowest of their outermost links unless the"
        " cluster says otherwise); a step is that of the slowest, whose figures all other tables have:\n"
        + table(lines, headers)
    )
