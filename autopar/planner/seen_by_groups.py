"""A plan as groups of devices see it, and what a row of the batch costs on each: by one evaluation, or between two."""

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.mesh import SeenShares
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.assignment import Assignment
from autopar.shares.device_shares import DeviceSpeed


@dataclass(frozen=True)
class PlanOnGroups:
    """A plan as each group of devices sees it, in order; `plan`: as the slowest does, the first of equals."""

    plan: Plan
    views: tuple[Plan, ...]

    @property
    def is_over(self) -> bool:
        """Whether it exceeds the memory of a group by the estimate."""
        return any(sum(view.memory_bytes) > view.memory_limit_bytes for view in self.views)


@dataclass(frozen=True)
class KnownChoices:
    """The choices of a plan in shares `sizes`."""

    choices: Assignment
    sizes: tuple[int, ...]
    found_by: str


# The choices of a plan that exceeds the memory of a group, and the seconds that no plan in its shares takes less than,
# whatever memory there is; raises MadeInMore if in more microbatches it fits, and takes hardly longer.
InMore = Callable[[KnownChoices, float], None]


class MadeInMore(Exception):
    """The `plan` in more microbatches that makes a search in fewer needless."""

    def __init__(self, plan: StagedPlan) -> None:
        super().__init__()
        self.plan = plan


class TooMany(Exception):
    """The rows of a group are more than its memory holds, or no plan fits there at all."""

    def __init__(self, group: int, reason: InfeasibleError) -> None:
        super().__init__(str(reason))
        self.group, self.reason = group, reason


@dataclass(frozen=True)
class RowCosts:
    """Seconds and bytes of a row more."""

    row_s: float
    row_bytes: float

    def speed(self, view: Plan) -> DeviceSpeed:
        """The speed with which a rank takes as long for its rows as in `view`."""
        return DeviceSpeed(self.row_s, max(0.0, view.step_s - self.row_s * rows_seen(view)))

    def learned(self, before: Plan, now: Plan) -> "RowCosts":
        """The costs between two numbers of rows, if they differ."""
        more = rows_seen(now) - rows_seen(before)
        if not more:
            return self
        row_s, row_bytes = (now.step_s - before.step_s) / more, (now.memory_bytes[0] - before.memory_bytes[0]) / more
        return RowCosts(max(row_s, 1e-15), max(row_bytes, 1e-9))


def by_parts(view: Plan) -> RowCosts:
    """The costs if compute and what is sent for each microbatch are in proportion to rows, and nothing else is."""
    costs, rows = view.costs, rows_seen(view)
    seconds = costs.compute_forward_s + costs.compute_backward_s
    seconds += sum(each_s for (_, is_once), each_s in costs.communication.items() if not is_once)
    num_bytes = sum(costs.memory_bytes.get(kind, 0) for kind in ("activations", "arguments", "recomputed"))
    return RowCosts(max(seconds / rows, 1e-15), max(num_bytes / rows, 1e-9))


def rows_seen(view: Plan) -> int:
    """The rows of the batch of the rank that sees the plan so; 0 if all have equally many."""
    return next((rows[rows.seen] for _, rows in view.mesh.shares if isinstance(rows, SeenShares)), 0)
