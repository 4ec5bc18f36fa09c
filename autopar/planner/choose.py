"""`choose_plan`: the better of the best plans with and without stages and microbatches."""

import math
from dataclasses import replace
from enum import Enum
from typing import Any

from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.autocast import without_autocast
from autopar.ir.graph import Graph
from autopar.ir.rarely_collected import rarely_collected
from autopar.mesh import PIPELINE, Devices, Mesh, stages_first
from autopar.planner.budget import Budget, Interrupted, Progress, Watch
from autopar.planner.fit_memory import Predict
from autopar.planner.groups_in_microbatches import plan_on_groups
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.layouts.tie import least_gain
from autopar.planner.pipeline.search_pipeline import WithoutStages, plan_in_stages
from autopar.planner.request import ANYTHING, PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.proof.unknown_ops import with_unknown_ops
from autopar.units import format_seconds

# If a plan leaves more than this share of the memory limit free, the limit does not bind.
_FREE = 0.1
# The share of the time left for the first of two ways, if the second one may be as good.
_SHARE_OF_FIRST = 0.75
# Seconds that the plan found and the prediction of its peak take for each op of the graph, on one core of an EPYC, for
# GPUs and for CPUs, whose kernels are asked one by one; at most this share of the time is left for them.
_LAST_S_PER_OP, _MOST_LAST = {"cuda": 1e-3, "cpu": 1.8e-3}, 0.6


class Way(Enum):
    """A way to plan: `WHOLE`, without stages and microbatches, or `STAGED`, with them and activation checkpointing."""

    WHOLE = "whole"
    STAGED = "staged"


@without_autocast()
def choose_plan(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest = ANYTHING,
    *,
    to_beat_s: float = math.inf,
    progress: Progress | None = None,
    predict: Predict | None = None,
    watch: Watch | None = None,
) -> Plan | StagedPlan:
    """The best plan within the time limit; for training also with stages, microbatches and activation checkpointing.

    Shortly before the time limit, and after Ctrl-C, searches end with the best plan so far, possibly a hand plan, whose
    peak is predicted in the rest of the time; after Ctrl-C only if that takes a second at most, else the plan says that
    it may not fit. `predict`: plan -> predicted peak in bytes of a device of each rank, which must be within the limit;
    by default the estimate of the search is used. `to_beat_s`: the step of a plan on other devices; only what is
    expected to take less is searched, and InfeasibleError says that there is none. `watch`: called with each artifact,
    in order (`planner.printed`).
    MicrobatchError or another AutoparError if no plan satisfies the request.
    """
    mesh = request.in_shares(stages_first(mesh))
    limit_s, request = request.time_limit_s, request.on(cluster)
    graph = with_unknown_ops(request.training.reduced(graph), request.unknown_ops)
    last_s = _LAST_S_PER_OP["cpu" if cluster.device_type == "cpu" else "cuda"] * len(graph.ops)
    budget = Budget.of(limit_s - min(_MOST_LAST * limit_s, last_s), progress, watch)
    ways = _ways(graph, mesh, cluster, request)
    whole: Plan | StagedPlan | None = None
    staged: Plan | StagedPlan | None = None
    failures: dict[Way, AutoparError] = {}
    budget.show("graph", graph)
    with rarely_collected(), budget.ended_by_interrupt():
        pending = [*ways]
        for way in pending:
            share = _SHARE_OF_FIRST if len(ways) > 1 and way == ways[0] else 1.0
            asked: dict[str, Any] = {"budget": budget, "predict": predict}
            try:
                if way is Way.WHOLE and not (staged is not None and budget.is_spent):
                    part = replace(budget.part(share), has_other=staged is not None or way is not pending[-1])
                    asked |= {"budget": part, "to_beat_s": min(to_beat_s, _to_beat_s(staged, mesh, cluster))}
                    make = make_plan if cluster.groups is None else plan_on_groups
                    whole = make(graph, mesh, cluster, request, **asked)
                elif way is Way.STAGED and (whole is None or (_binds(whole) and not budget.is_spent)):
                    is_searched = way is not ways[0] and not budget.is_spent
                    known = WithoutStages.of(whole, to_beat_s, is_searched=is_searched)
                    staged = plan_in_stages(graph, mesh, cluster, request, whole=known, share=share, **asked)
            except AutoparError as error:
                if way is Way.WHOLE and not isinstance(error, InfeasibleError):
                    raise
                failures[way] = error
            except Interrupted:
                pending.append(way)  # if the other way gives no plan
        plan = _better(whole, staged, cluster)
        if plan is None:
            raise _most_telling(failures, to_beat_s)
        ended = f", ended by {budget.ended_by}" if budget.is_spent else ""
        plan = replace(plan, found_by=plan.found_by.removesuffix(ended) + ended, timings=budget.all_timings)
    budget.show("plan", plan)
    return plan


def _ways(graph: Graph, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest) -> tuple[Way, ...]:
    """The ways to plan, in order.

    On a mesh without a pipeline axis microbatches and checkpointing only save memory: they come second, and are tried
    only if memory binds. On an open mesh stages come first. A graph without ops has no stages.
    """
    has_stages = isinstance(mesh, Mesh) and PIPELINE in mesh.axis_names
    if has_stages and not request.training.trains:
        raise AutoparError(
            f"mesh {mesh} has a pipeline axis: inference (trains=False) is planned without stages; take a mesh without"
            f" {PIPELINE}"
        )
    if has_stages and not request.trains:
        raise AutoparError(
            f"mesh {mesh} has a pipeline axis: stages are run by model.train_step(...), not by model(...); call that"
            f" first, or take a mesh without {PIPELINE}"
        )
    if isinstance(mesh, Mesh) and cluster.groups is not None and not has_stages:
        return (Way.WHOLE,)
    if has_stages or (request.trains and not request.is_open and request.num_microbatches != 1):
        return (Way.STAGED,)
    is_whole = request.num_microbatches == 1 or (isinstance(mesh, Devices) and request.pins)
    if not request.trains or not graph.ops or is_whole:
        return (Way.WHOLE,)
    return (Way.WHOLE, Way.STAGED) if isinstance(mesh, Mesh) else (Way.STAGED, Way.WHOLE)


def _to_beat_s(staged: Plan | StagedPlan | None, mesh: Mesh | Devices, cluster: Cluster) -> float:
    """The step that a plan without stages has to beat to be searched.

    Within a node it is searched in any case: stages gain little there, and hand plans are no guide for a batch too
    small to split.
    """
    is_one_node = mesh.num_devices <= (cluster.levels[0].size or mesh.num_devices)
    return math.inf if staged is None or is_one_node else staged.step_s


def _binds(plan: Plan | StagedPlan) -> bool:
    """Whether the plan fills its memory limit, so that saving memory may give a faster one."""
    return any(used > (1 - _FREE) * limit for used, limit in zip(plan.memory_bytes, plan.rank_limits_bytes))


def _better(
    whole: Plan | StagedPlan | None, staged: Plan | StagedPlan | None, cluster: Cluster
) -> Plan | StagedPlan | None:
    """The plan in stages if it gains enough (`least_gain`), else the other; None if there is none."""
    if whole is None or staged is None:
        return whole or staged
    least = least_gain(cluster) if isinstance(staged, StagedPlan) else 0.0
    return whole if staged.step_s >= (1 - least) * whole.step_s else staged


def _most_telling(failures: dict[Way, AutoparError], to_beat_s: float) -> AutoparError:
    """The error to raise: that with stages if it names the memory of the lightest of all plans, else the other; without
    failures, that nothing is fast enough.

    With stages it may only say that the batch cannot be cut, or that there is no loss.
    """
    if not failures:
        return InfeasibleError(f"no plan is expected to take less than {format_seconds(to_beat_s)}")
    staged = failures.get(Way.STAGED)
    if isinstance(staged, InfeasibleError) or Way.WHOLE not in failures:
        assert staged is not None, "a way failed"
        return staged
    return failures[Way.WHOLE]
