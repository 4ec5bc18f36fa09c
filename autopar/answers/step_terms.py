"""The time and the memory of a plan as terms whose sum is exactly what the plan is priced at."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.evaluate import PlannedCollective
from autopar.costmodel.overlap.pass_time import lane_of
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan

AnyPlan = Plan | StagedPlan
# The terms beside those of link levels, in the order in which they are shown.
FORWARD, BACKWARD, UPDATE, BUBBLE, HIDDEN = (
    "compute forward",
    "compute backward",
    "update",
    "bubble and sends",
    "hidden behind compute",
)


def step_terms(plan: AnyPlan) -> dict[str, float]:
    """Term -> seconds of a step; their sum is `plan.step_s` but for rounding.

    Terms: compute, collectives of each link level, update, exposed host transfers, and what is hidden, which is
    negative. Of a plan in stages: those of the busiest rank during the schedule, and of the slowest rank in the work
    once a step; what is left of the schedule is "bubble and sends", the waiting for other stages.
    """
    if isinstance(plan, Plan):
        terms = _terms(plan, plan.costs.num_issued) | ({HIDDEN: -plan.costs.hidden_s} if plan.costs.hidden_s else {})
        return {name: seconds for name, seconds in terms.items() if seconds or plan.training.trains}
    ranks = [[plan.stages[stage] for stage in plan.schedule.stages_of(n)] for n in range(plan.schedule.num_ranks)]
    busiest = max(ranks, key=lambda stages: sum(map(_scheduled_s, stages)))
    slowest = max(ranks, key=lambda stages: sum(stage.costs.once_s for stage in stages))
    total = _sum([*map(_of_schedule, busiest), *map(_once, slowest)])
    return total | {BUBBLE: plan.step_s - sum(total.values())}


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total = defaultdict[str, float](float)
    for part in parts:
        for name, amount in part.items():
            total[name] += amount
    return dict(total)


def _scheduled_s(stage: Plan) -> float:
    """Seconds that a stage works in a step's schedule."""
    return sum(_of_schedule(stage).values())


def _of_schedule(stage: Plan) -> dict[str, float]:
    """The terms of all microbatches."""
    issued = stage.costs.num_issued
    terms = _terms(stage, lambda planned: 0 if planned.is_once else issued(planned))
    return {name: seconds for name, seconds in terms.items() if name not in (UPDATE, _host("update"))}


def _once(stage: Plan) -> dict[str, float]:
    """The terms of the work once a step."""
    terms = _terms(stage, lambda planned: int(planned.is_once))
    not_once = (FORWARD, BACKWARD, _host("forward"), _host("backward"))
    return {name: seconds for name, seconds in terms.items() if name not in not_once}


def _host(phase: str) -> str:
    return f"exposed host transfers, {phase}"


def _terms(plan: Plan, times: Callable[[PlannedCollective], int]) -> dict[str, float]:
    """The terms without what is hidden; `times`: how often a collective counts."""
    costs = plan.costs
    levels = defaultdict[int, float](float)
    for planned in costs.collectives:
        levels[lane_of(plan.cluster.levels, plan.mesh.shape, planned.collective.axes)] += (
            times(planned) * planned.time_s
        )
    terms = {FORWARD: costs.compute_forward_s, BACKWARD: costs.compute_backward_s}
    terms |= {level_name(plan.cluster, level): seconds for level, seconds in sorted(levels.items()) if seconds}
    terms |= {UPDATE: costs.optimizer_s}
    return terms | {_host(phase): seconds for phase, seconds in costs.waiting_s.items() if seconds}


def level_name(cluster: Cluster, level: int) -> str:
    """The term of collectives on a link level, as "collectives in blocks of 8".

    >>> from autopar.costmodel.cluster.load_cluster import load_cluster
    >>> [level_name(load_cluster("h100"), level) for level in (0, 1)]
    ['collectives within 8 devices', 'collectives across all devices']
    """
    size = 1
    for each in cluster.levels[: level + 1]:
        size *= each.size
    return f"collectives within {size} devices" if size else "collectives across all devices"


def memory_terms(plan: AnyPlan) -> dict[str, float]:
    """Kind of memory -> bytes of a device by the estimate; of a plan in stages those of the fullest rank."""
    if isinstance(plan, Plan):
        return dict(plan.costs.memory_bytes)
    fullest = max(range(plan.schedule.num_ranks), key=lambda rank: plan.memory_bytes[rank])
    return _sum(plan.stages[stage].costs.memory_bytes for stage in plan.schedule.stages_of(fullest))


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Term -> after less before, largest first; terms that are equal are left out.

    >>> changes({"a": 1.0, "b": 2.0}, {"b": 5.0, "a": 1.0, "c": -4.0})
    {'c': -4.0, 'b': 3.0}
    """
    names = dict.fromkeys((*before, *after))
    found = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
    return {name: change for name, change in sorted(found.items(), key=lambda item: -abs(item[1])) if change}
