"""Plans whose predicted peak fits: if the peak exceeds the memory limit, the search runs again under a lower one.

The search limits an estimate, a sum over choices. The peak of the program may be above or below it, so the peak of each
plan is predicted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from autopar.errors import InfeasibleError
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan

AnyPlan = Plan | StagedPlan
Predict = Callable[[Any], tuple[int, ...]]  # plan -> predicted peak in bytes of a device of each rank of the pipeline
OnePlan = TypeVar("OnePlan", bound=AnyPlan)  # the plans of one search are of one kind

# The number of searches under lower limits for a plan that does not fit.
_MOST_TRIES = 3
# The limit is lowered by a little more than the excess, since that of the next plan may be a little larger.
_MARGIN = 0.005
# A small excess, below this share of the limit, is much the same for all plans, such as a gradient of the vocabulary.
_LITTLE = 1.15


@dataclass(frozen=True)
class Candidate(Generic[OnePlan]):
    """A plan that was searched under `allowed_bytes`, limits of the estimate for each rank; (): the memory limit
    itself.

    `again`: plans again under other limits; None if nothing fits.
    """

    plan: OnePlan
    again: Callable[[Sequence[float]], OnePlan | None]
    allowed_bytes: Sequence[float] = ()
    num_tries: int = 0


def best_fitting(found: Iterable[Candidate[OnePlan]], limit_bytes: float, predict: Predict | None) -> OnePlan | None:
    """The fastest plan whose predicted peak is within the limit, among the candidates and plans searched again.

    None if there is none. Without `predict` the estimate is used.
    """
    waiting = list(found)
    while waiting:
        one = min(waiting, key=lambda candidate: candidate.plan.step_s)
        waiting.remove(one)
        plan = replace(one.plan, memory_limit_bytes=limit_bytes)
        if predict is not None:
            plan = replace(plan, peak_bytes=predict(plan))
        if max(plan.peak_bytes, default=0) <= limit_bytes:
            return plan
        allowed = _lowered(one.allowed_bytes or (limit_bytes,) * len(plan.peak_bytes), plan, limit_bytes)
        other = one.again(allowed) if one.num_tries < _MOST_TRIES else None
        if other is not None:
            waiting.append(Candidate(other, one.again, allowed, one.num_tries + 1))
    return None


def _lowered(allowed_bytes: Sequence[float], plan: AnyPlan, limit_bytes: float) -> tuple[float, ...]:
    """The limits of the estimate, lowered for each rank whose peak is too large: by the excess, or in proportion."""
    found = []
    for allowed, estimate, peak in zip(allowed_bytes, plan.memory_bytes, plan.peak_bytes, strict=True):
        lower = estimate - (peak - limit_bytes) if peak < _LITTLE * limit_bytes else limit_bytes * estimate / peak
        found.append(allowed if peak <= limit_bytes else min(allowed, lower) - _MARGIN * limit_bytes)
    return tuple(found)


def fitting(
    make: Callable[[float], OnePlan], limit_bytes: float, predict: Predict | None, *, to_beat_s: float = math.inf
) -> OnePlan:
    """The plan of `make`, called with a limit of the estimate under which its predicted peak is within the memory
    limit.

    A plan that takes longer than `to_beat_s` is returned without prediction. InfeasibleError of `make` if there is no
    plan under the limit itself, else one with the predicted peak.
    """
    reasons: list[str] = []

    def again(allowed_bytes: Sequence[float]) -> OnePlan | None:
        try:
            return make(min(allowed_bytes))
        except InfeasibleError as error:
            reasons.append(str(error))
            return None

    first = make(limit_bytes)
    if first.step_s > to_beat_s:
        return first
    recorded = Recorded(predict)
    found = best_fitting([Candidate(first, again)], limit_bytes, predict and recorded)
    if found is None:
        raise above_estimate(
            recorded, limit_bytes, reasons[-1] if reasons else "so would others; raise it, or use more devices"
        )
    return (
        replace(found, lower_bound_s=min(first.lower_bound_s, found.lower_bound_s))
        if isinstance(found, Plan)
        else found
    )


@dataclass
class Recorded:
    """`predict`, and the first plan given to it with its peaks, which an error names.

    `least_ratio`: the least ratio of estimate to peak of any rank and plan so far; at most 1.
    """

    predict: Predict | None
    first: tuple[AnyPlan, tuple[int, ...]] | None = None
    least_ratio: float = 1.0

    def __call__(self, plan: AnyPlan) -> tuple[int, ...]:
        assert self.predict is not None, "asked about a plan without a way to predict its peaks"
        peaks = self.predict(plan)
        self.first = self.first or (plan, peaks)
        self.least_ratio = min(
            self.least_ratio, *(estimate / peak for estimate, peak in zip(plan.memory_bytes, peaks, strict=True))
        )
        return peaks


def above_estimate(recorded: Recorded, limit_bytes: float, rest: str) -> InfeasibleError:
    """The error that the first predicted plan exceeds the limit though its estimate does not, and `rest` of others."""
    assert recorded.first is not None, "no plan was asked about"
    plan, peaks = recorded.first
    return InfeasibleError(
        f"no plan found fits in {limit_bytes:.0f} bytes ({limit_bytes / 2**30:.2f} GiB) per device: the first one, of"
        f" {max(plan.memory_bytes)} bytes by the estimate, has a predicted peak of {max(peaks)} bytes"
        f" ({max(peaks) / 2**30:.2f} GiB); {rest}"
    )
