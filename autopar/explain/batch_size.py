"""The check whether a batch is too small: the pipeline mostly fills and drains, or devices duplicate work."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.costmodel.work_bound import floor_s
from autopar.plans.base_plan import UNPREDICTED
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.analysis.sequence_dim import batch_arguments
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import as_array, ordered, step_s
from autopar.units import format_bytes

# A batch is too small if more than the first share of the time is wasted, large enough if at most the second is.
_MUCH, _LITTLE = 0.3, 0.1


@dataclass(frozen=True)
class TooSmall:
    """The finding that a batch is too small: `wasted`, from 0 to 1, of the time goes to `what`.

    `batch`: its samples; `enough`: samples with which the waste would be at most `_LITTLE`.
    """

    batch: int
    what: str
    wasted: float
    enough: int

    def __str__(self) -> str:
        return (
            f"The batch of {self.batch} is too small for these devices: {self.what} for {self.wasted:.0%} of the time."
            f" With a batch of {self.enough} it would be at most {_LITTLE:.0%}; take a larger batch, or fewer devices."
        )


def too_small(plan: Plan | StagedPlan) -> TooSmall | None:
    """The reason why the batch is too small, with the least batch known to be enough; None if it is not."""
    arguments = batch_arguments(plan.graph)
    if not arguments:
        return None
    batch = arguments[0].value.shape[0]
    return _filling(plan, batch) if isinstance(plan, StagedPlan) else _repeating(plan, batch)


def notes(plan: Plan | StagedPlan) -> tuple[str, ...]:
    """Remarks that a user should read before running the plan."""
    small = too_small(plan)
    return (*((str(small),) if small else ()), *_unpredicted(plan), *_reordered(plan))


def _reordered(plan: Plan | StagedPlan) -> Iterator[str]:
    groups = plan.cluster.groups
    if groups is not None and groups.reordered_from:
        yield (
            f"The groups of devices lie along the ranks in the order {plan.cluster.name}, not in that of"
            f" {groups.reordered_from}. To run it, start the ranks in this order, and plan for the cluster in this"
            " order; a mesh with axes, such as 'pp=2,dp=4', keeps the order that the ranks have."
        )


def _unpredicted(plan: Plan | StagedPlan) -> Iterator[str]:
    if UNPREDICTED in plan.found_by:
        used, limit = plan.fullest_bytes
        yield (
            "Planning was interrupted before the peak memory of the plan was predicted: it fits by the estimate of the"
            f" search, {format_bytes(used)} of {format_bytes(limit)} per device, but its peak may not. Let planning"
            " end, or give time_limit_s=, before you rely on it."
        )


def _filling(plan: StagedPlan, batch: int) -> TooSmall | None:
    """The finding for a pipeline.

    With m microbatches, at least one a rank, a step takes `fill_s + m * each_s`; two simulations give both.
    """
    schedule, num, ranks = plan.schedule, plan.schedule.num_microbatches, plan.schedule.num_ranks
    if ranks == 1 or plan.timeline.bubble <= _MUCH:
        return None
    full = ranks * math.ceil(num / ranks)
    full_s, double_s = (_step_s(plan, replace(schedule, num_microbatches=many)) for many in (full, 2 * full))
    each_s = (double_s - full_s) / full
    wasted, fill_s = 1 - num * each_s / plan.timeline.step_s, full_s - full * each_s
    if wasted <= _MUCH:
        return None
    enough = ranks * math.ceil((1 - _LITTLE) / _LITTLE * fill_s / each_s / ranks)
    return TooSmall(batch, "the pipeline fills and drains", wasted, enough * batch // num)


def _step_s(plan: StagedPlan, schedule: Schedule) -> float:
    return float(step_s(ordered(schedule), as_array(plan.times)))


def _repeating(plan: Plan, batch: int) -> TooSmall | None:
    """The finding for a plan without stages; a batch with a sample a device can be split evenly over all of them."""
    if batch >= plan.mesh.num_devices:
        return None
    computing_s = plan.costs.compute_forward_s + plan.costs.compute_backward_s + plan.costs.optimizer_s
    wasted = 1 - floor_s(plan.graph, plan.mesh, plan.cluster, training=plan.training) / computing_s
    return (
        TooSmall(batch, "devices repeat each other's work", wasted, plan.mesh.num_devices) if wasted > _MUCH else None
    )
