"""Whether a batch is too small for the devices: pipelines spend a step filling and draining, or devices repeat each
other's work.
"""

import math
from dataclasses import dataclass, replace

from autopar.costmodel.work_bound import floor_s
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.analysis.sequence_dim import batch_arguments
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import as_array, ordered, step_s

# A batch is too small where more than this part of the time goes that way; one for which it is at most that part is
# not.
_MUCH, _LITTLE = 0.3, 0.1


@dataclass(frozen=True)
class TooSmall:
    """batch: samples a step, in which `wasted`, a part from 0 to 1, of the time goes to `what`. enough: samples with
    which it would be `_LITTLE` at most.
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
    """Why the batch is too small, if it is, and the least batch known to be enough."""
    arguments = batch_arguments(plan.graph)
    if not arguments:
        return None
    batch = arguments[0].value.shape[0]
    return _filling(plan, batch) if isinstance(plan, StagedPlan) else _repeating(plan, batch)


def notes(plan: Plan | StagedPlan) -> tuple[str, ...]:
    """What a person should know before running the plan."""
    small = too_small(plan)
    return (str(small),) if small else ()


def _filling(plan: StagedPlan, batch: int) -> TooSmall | None:
    """From one microbatch for each rank on, a step takes `fill_s + m * each_s` with m of them: two simulations tell
    both.
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
    """A batch of a sample a device can be split evenly over all of them."""
    if batch >= plan.mesh.num_devices:
        return None
    computing_s = plan.costs.compute_forward_s + plan.costs.compute_backward_s + plan.costs.optimizer_s
    wasted = 1 - floor_s(plan.graph, plan.mesh, plan.cluster, training=plan.training) / computing_s
    return (
        TooSmall(batch, "devices repeat each other's work", wasted, plan.mesh.num_devices) if wasted > _MUCH else None
    )
