"""Plans whose predicted peak fits: if the peak exceeds the memory limit, the search runs again under a lower one.

The search limits an estimate, a sum over choices. The peak of the program may be above or below it, so the peak of each
plan is predicted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from autopar.errors import InfeasibleError
from autopar.planner.budget import Budget, Interrupted
from autopar.plans.base_plan import UNPREDICTED
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan

AnyPlan = Plan | StagedPlan
Predict = Callable[[Any], tuple[int, ...]]  # plan -> predicted peak in bytes of a device of each rank of the pipeline
OnePlan = TypeVar("OnePlan", bound=AnyPlan)  # the plans of one search are of one kind


@dataclass(frozen=True)
class AfterOthers:
    """A `Predict` for plans that compete with those on other devices.

    `least_s`: step of a plan -> the least step of those on other devices, which are looked for first.
    """

    predict: Predict
    least_s: Callable[[float], float]

    def __call__(self, plan: Any) -> tuple[int, ...]:
        return self.predict(plan)


# Seconds that the prediction of a peak takes for each op of the graph, at most, on one core of an EPYC: llama3-405b on
# 256x8x8 in microbatches, where t5-large on 8x8 takes half. After Ctrl-C a prediction that takes longer than the second
# figure is left out, and the plan says so.
_PEAK_S_PER_OP, _PATIENCE_S = 2.5e-4, 1.0
# The number of searches under lower limits for a plan that does not fit.
MOST_TRIES = 3
# The limit is lowered by a little more than the excess, since that of the next plan may be a little larger.
_MARGIN = 0.005
# A small excess, below this share of the limit, is much the same for all plans, such as a gradient of the vocabulary.
_LITTLE = 1.15


@dataclass(frozen=True)
class LimitedSearch(Generic[OnePlan]):
    """A search under `allowed_bytes`, limits of the estimate for each rank, and the plan that it found.

    `plan`: None before the search, or if nothing fits. `source`: what the caller needs to search again. `number`: 0,
    and one more for each search under lower limits than the one before. `at_least_s`: a search that is to be
    made comes after the plans that take less.
    """

    allowed_bytes: Sequence[float]
    plan: OnePlan | None = None
    source: Any = None
    number: int = 0
    at_least_s: float = 0.0

    @property
    def order(self) -> tuple[float, bool]:
        """The rank among searches: by the step, that of a plan before an equal lower bound."""
        return (self.at_least_s, True) if self.plan is None else (self.plan.step_s, False)


@dataclass
class Fit(Generic[OnePlan]):
    """The fastest plan whose predicted peak is within the limit, among those that are searched.

    `limit_bytes`: of any device (`rank_limits_bytes` of a plan has that of each rank). `waiting`: searches with their
    plans, and those that are to be made. Without `predict` the estimate is used.
    `first`: the first plan that was predicted, with its peaks. `least_ratio`: the least ratio of estimate to peak of
    any rank and plan so far, at most 1. `reasons`: why searches under lower limits found no plan.
    """

    limit_bytes: float
    predict: Predict | None
    budget: Budget
    best: OnePlan | None = None
    waiting: list[LimitedSearch[OnePlan]] = field(default_factory=list)
    first: tuple[AnyPlan, tuple[int, ...]] | None = None
    least_ratio: float = 1.0
    reasons: list[str] = field(default_factory=list)

    @property
    def to_beat_s(self) -> float:
        """The step of the fastest plan that waits; `inf` if none does."""
        return min((one.plan.step_s for one in self.waiting if one.plan is not None), default=math.inf)

    def add(self, search: LimitedSearch[OnePlan], plan: OnePlan | None, at_least_s: float = math.inf) -> None:
        """Add a search with its plan; without one it is made again if no plan that takes less than `at_least_s` fits.

        `at_least_s`: `inf` if it found none because none fits.
        """
        if plan is not None or at_least_s < math.inf:
            self.waiting.append(replace(search, plan=plan, at_least_s=at_least_s))

    def searches(self) -> Iterator[LimitedSearch[OnePlan]]:
        """The searches to make, until the fastest plan fits or none is left.

        The caller adds each to `waiting` with the plan that it finds.
        """
        while self.waiting and self.best is None:
            one = min(self.waiting, key=lambda search: search.order)
            self.waiting.remove(one)
            if one.plan is None:
                yield one
                continue
            plan = self._predicted(replace(one.plan, memory_limit_bytes=self.limit_bytes))
            if all(peak <= limit for peak, limit in zip(plan.peak_bytes, plan.rank_limits_bytes)):
                self.best = plan
            elif one.number < MOST_TRIES:
                allowed = _lowered(one.allowed_bytes, plan)
                yield replace(one, plan=None, allowed_bytes=allowed, number=one.number + 1)

    def _predicted(self, plan: OnePlan) -> OnePlan:
        if self.predict is None:
            return plan
        is_long, peaks = len(plan.graph.ops) * _PEAK_S_PER_OP > _PATIENCE_S, None
        if not (is_long and self.budget.deadline.is_stopped):
            leaving = self.budget.left_at_interrupt() if is_long else nullcontext()
            with suppress(Interrupted), self.budget.timed("peak"), leaving:
                peaks = self.predict(plan)
        if peaks is None:
            return replace(plan, found_by=f"{plan.found_by}, {UNPREDICTED}")
        self.first = self.first or (plan, peaks)
        ratios = (estimate / peak for estimate, peak in zip(plan.memory_bytes, peaks, strict=True))
        self.least_ratio = min(self.least_ratio, *ratios)
        return replace(plan, peak_bytes=peaks)

    def refusal(self, rest: str) -> InfeasibleError:
        """The error that the first predicted plan exceeds the limit though its estimate does not, and `rest` of others.

        `rest` is said unless a search under a lower limit gave a reason of its own.
        """
        assert self.first is not None, "no plan was predicted"
        plan, peaks = self.first
        used = zip(peaks, plan.memory_bytes, plan.rank_limits_bytes, range(len(peaks)))
        peak, estimate, limit, rank = max(used, key=lambda one: one[0] / one[2])
        there = f" of rank {rank}" if len(set(plan.rank_limits_bytes)) > 1 else ""
        return InfeasibleError(
            f"no plan found fits in {limit:.0f} bytes ({limit / 2**30:.2f} GiB) per device{there}: the first one, of"
            f" {estimate} bytes by the estimate, has a predicted peak of {peak} bytes ({peak / 2**30:.2f} GiB);"
            f" {self.reasons[-1] if self.reasons else rest}"
        )


def _lowered(allowed_bytes: Sequence[float], plan: AnyPlan) -> tuple[float, ...]:
    """The limits of the estimate, lowered for each rank whose peak is too large: by the excess, or in proportion."""
    lowered = []
    ranks = zip(allowed_bytes, plan.memory_bytes, plan.peak_bytes, plan.rank_limits_bytes, strict=True)
    for allowed, estimate, peak, limit in ranks:
        lower = estimate - (peak - limit) if peak < _LITTLE * limit else limit * estimate / peak
        lowered.append(allowed if peak <= limit else min(allowed, lower) - _MARGIN * limit)
    return tuple(lowered)
