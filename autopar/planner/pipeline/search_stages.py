"""The best layouts of each stage of a pipeline that is cut already, rank by rank on the stages' own mesh."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.cluster.device_groups import cluster_of_rank
from autopar.costmodel.training import Training
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.planner.budget import Budget
from autopar.planner.pipeline.cut_stages import Cut
from autopar.planner.pipeline.search_rank import TooSlow, as_written, best_plans
from autopar.planner.pipeline.stage_tables import CutTask, RankTask, SolvedStages, StageCache
from autopar.planner.pipeline.stage_times import in_flight, waiting
from autopar.planner.pipeline.wanted_stages import StagePlans, Stages, Wanted, pressure_of
from autopar.plans.plan import plan_of
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.placement import format_layout


@dataclass(frozen=True)
class PointSearch:
    """The searches of the stages of a point, one for each choice of boundary layouts, with their caches.

    `keeping`: those with all optimizer state on the device.
    """

    graph: Graph
    offloading: tuple[tuple[CutTask, StageCache], ...]
    keeping: tuple[tuple[CutTask, StageCache], ...] = ()


def searched(
    searches: PointSearch, limits_bytes: Sequence[float], budget: Budget, to_beat_s: float = math.inf
) -> tuple[StagedPlan | None, float]:
    """The best plan of a point within these limits of each rank; once the budget is spent, the first that is found.

    If there is none, also the seconds that plans which are too slow take at least, else `inf`.

    `to_beat_s`: of a point with one rank, plans that take as long or longer are not needed.

    If optimizer state is offloaded, plans that keep it are searched too: a stage gains by offloaded state in each
    microbatch, the pipeline only if the stage is the slowest, and it waits for the state once a step.
    """
    plans: list[StagedPlan] = []
    at_least_s = math.inf
    for task, cache in (*searches.offloading, *searches.keeping):
        if plans and budget.is_spent:
            break
        if not task.may_move_state and not any(one.assignment.state_on_host for plan in plans for one in plan.stages):
            break
        try:
            solved = solve_stages(task, cache, limits_bytes, budget, to_beat_s)
        except TooSlow as error:
            at_least_s = min(at_least_s, error.at_least_s)
            continue
        except InfeasibleError:
            continue
        point, request = task.point, task.request
        training = request.training.staged(point.schedule.num_microbatches, point.schedule.num_ranks)
        place, limit, starts = (point.whole_mesh, task.cluster), request.limit_bytes, task.cut.starts
        found_by = "search" if solved.is_searched else f"hand plan {point.name}"
        plans.append(
            StagedPlan(*place, training, limit, searches.graph, point.schedule, starts, solved.plans, found_by=found_by)
        )
    return min(plans, key=lambda plan: plan.step_s, default=None), at_least_s


def solve_stages(
    task: CutTask, cache: StageCache, limits_bytes: Sequence[float], budget: Budget, to_beat_s: float = math.inf
) -> SolvedStages:
    """The plans of the stages, those of a rank together within its limit.

    Once the budget is spent, stages are laid out as by hand where that fits. If it ends between two ranks, a searched
    rank may store a tied parameter in another layout than the hand plan; then all ranks take the hand plan.
    InfeasibleError if one rank's cannot be made to fit, which a plan that the sweep has seen to fit should, or take
    `to_beat_s` or longer.
    """
    order = _tightest_first(task, limits_bytes)
    left, is_again = deque(order), False
    of_rank: dict[int, SolvedStages] = {}
    while left:
        rank = left.popleft()
        key, numbers = (rank, limits_bytes[rank]), task.point.schedule.stages_of(rank)
        try:
            if key not in cache.solved:
                on = cluster_of_rank(task.cluster, rank, task.point.schedule.num_ranks)
                own = (task, cache) if on is task.cluster else (replace(task, cluster=on), cache.of(on))
                at = RankTask(*own, limits_bytes[rank], budget, to_beat_s)
                _tie_within(task, numbers, cache.tied)
                stages = tuple(_wanted(task, number, cache.tied) for number in numbers)
                best = (as_written(at, stages) if budget.is_spent else None) or best_plans(at, stages)
                cache.solved[key] = _solved(at, stages, best)
            of_rank[rank] = cache.solved[key]
        except InfeasibleError:
            if is_again or not (budget.is_spent and any(one.is_searched for one in cache.solved.values())):
                raise
            cache.solved.clear(), cache.tied.clear()
            left, is_again = deque(order), True
    plans = {
        number: plan
        for rank, solved in of_rank.items()
        for number, plan in zip(task.point.schedule.stages_of(rank), solved.plans, strict=True)
    }
    is_searched = any(solved.is_searched for solved in of_rank.values())
    return SolvedStages(tuple(plans[number] for number in range(len(task.cut.stages))), is_searched)


def _tightest_first(task: CutTask, limits_bytes: Sequence[float]) -> list[int]:
    """The ranks, those first of which plans are likely to do for others."""
    stages_of = map(task.point.schedule.stages_of, range(task.point.schedule.num_ranks))
    pressures = [
        pressure_of((_training(task, number) for number in numbers), limit)
        for numbers, limit in zip(stages_of, limits_bytes, strict=True)
    ]
    return sorted(range(len(pressures)), key=lambda rank: -pressures[rank])


def _solved(at: RankTask, stages: Stages, best: StagePlans) -> SolvedStages:
    """The plans of the stages of a rank; the cache learns the layouts of their tied parameters."""
    task, plans = at.task, []
    for one, (graph, assignment), costs in zip(stages, best.parts, best.costs or [None] * len(stages)):
        for item in (item for item in graph.of_kind("parameter") if item.fqn in task.shared):
            at.cache.tied.setdefault(item.fqn, format_layout(assignment.layouts[item.value.name]))
        asked = {"training": one.request.training, "memory_limit_bytes": at.limit_bytes}
        plan = plan_of(graph, assignment, task.mesh, task.cluster, costs=costs, **asked)
        plans.append(replace(plan, found_by="search"))
    return SolvedStages(tuple(plans), best.is_searched)


def _tie_within(task: CutTask, numbers: Sequence[int], tied: dict[str, str]) -> None:
    """Fix tied parameters of several stages of a rank to the layouts of
    the hand plan, since no stage is searched first.
    """
    seen: set[str] = set()
    for number in numbers:
        for item in task.cut.stages[number].graph.of_kind("parameter"):
            if item.fqn in seen:
                tied.setdefault(item.fqn, format_layout(task.cut.by_hand.layouts[item.value.name]))
            seen.add(item.fqn)


def _training(task: CutTask, number: int) -> Training:
    schedule = task.point.schedule
    counts = {"num_in_flight": in_flight(schedule)[number], "num_waiting": waiting(schedule)[number]}
    return task.request.training.staged(schedule.num_microbatches, schedule.num_ranks, **counts)


def _wanted(task: CutTask, number: int, tied: Mapping[str, str]) -> Wanted:
    stage = task.cut.stages[number]
    fqns = {item.fqn for item in stage.graph.inputs}
    stored = {fqn: layout for fqn, layout in {**tied, **task.request.stored}.items() if fqn in fqns}
    pins = {fqn: layout for fqn, layout in task.request.pins.items() if fqn in fqns}
    crossing, schedule = {name: task.crossing[name] for name in (*stage.receives, *stage.sends)}, task.point.schedule
    limit_bytes = task.request.rank_limits(task.cluster, schedule.num_ranks)[schedule.rank_of(number)]
    request = replace(task.request, memory_limit_bytes=limit_bytes, memory_share=1.0)
    request = replace(request, pins=pins, stored=stored, training=_training(task, number), crossing=crossing)
    most_saved = task.point.partition.num_recomputed[number]
    return Wanted(number, stage.graph, task.wirings[number], request, _regions(task.cut, stage.graph), most_saved)


def _regions(cut: Cut, graph: Graph) -> tuple[tuple[str, ...], ...]:
    own = {op.name for op in graph.ops}
    return tuple(region for region in cut.regions if region[0] in own)
