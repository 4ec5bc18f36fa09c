"""With stages and microbatches or without: the better plan of the two."""

import math
from collections.abc import Callable, Mapping

from autopar.costmodel.cluster import Cluster
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.plan.assemble import make_plan
from autopar.plan.clock import Clock, Progress
from autopar.plan.fitting import Predict, fitting
from autopar.plan.in_stages import Asked, plan_in_stages
from autopar.plan.plan import Plan
from autopar.plan.rarely_collected import rarely_collected
from autopar.plan.setting import Wishes
from autopar.plan.staged import PIPELINE, StagedPlan

Whole = Callable[..., Plan]  # (seconds of searching, step time to beat) -> the plan
InStages = Callable[..., Plan | StagedPlan | None]  # the same

# A plan that leaves more than this part of the memory limit free is not held back by it.
_FREE = 0.1
# Stages and microbatches change the training loop: they are chosen where they gain more than this part of a step.
_WORTH = 0.05
# Part of the searching time that stages get on an open mesh.
_SHARE_OF_STAGES = 0.5


@rarely_collected()
def choose_plan(
    graph: Graph, mesh: Mesh | Devices, cluster: Cluster, *,
    pins: Mapping[str, str] | None = None,
    stored: Mapping[str, str] | None = None,
    memory_limit_bytes: float | None = None,
    training: Training = WHOLE_BATCH,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    trains: bool = True,
    time_limit_s: float = 30.0,
    progress: Progress | None = None,
    predict: Predict | None = None,
) -> Plan | StagedPlan:  # fmt: skip
    """The best plan found in the time, as `make_plan`; for training also in stages, microbatches and with recomputed blocks.

    predict: what a plan takes of a device of each rank, which must be within the limit; by default what the search estimates is believed.

    num_microbatches, schedule: as asked, or None for the best. `trains`: whether the plan will be run by train_step; else it has one stage
    and one microbatch. MicrobatchError or AutoparError if what is asked cannot be.
    """
    limit = usable_memory_bytes(cluster) if memory_limit_bytes is None else memory_limit_bytes
    wishes, asked = Wishes(pins or {}, stored or {}, limit, training), Asked(num_microbatches, schedule)
    clock = Clock(progress or (lambda _: None))
    has_stages = isinstance(mesh, Mesh) and PIPELINE in mesh.axis_names

    def in_stages(time_s: float, cutoff_s: float = float("inf")) -> Plan | StagedPlan | None:
        return plan_in_stages(graph, mesh, cluster, wishes, asked, time_limit_s=time_s, clock=clock, cutoff_s=cutoff_s, predict=predict)

    def whole(time_s: float, to_beat_s: float = float("inf")) -> Plan:
        def make(allowed_bytes: float) -> Plan:
            return make_plan(
                graph, mesh, cluster, pins=pins, stored=stored, memory_limit_bytes=allowed_bytes, training=training, time_limit_s=time_s,
                to_beat_s=to_beat_s, progress=progress,
            )  # fmt: skip

        return fitting(make, limit, predict, to_beat_s=to_beat_s / (1 - _WORTH))

    if has_stages and not trains:
        raise AutoparError(
            f"mesh {mesh} has a pipeline axis: stages are run by model.train_step(...), not by model(...); call that first, or take a "
            f"mesh without {PIPELINE}"
        )
    if has_stages or (trains and not asked.is_open and num_microbatches != 1):
        return in_stages(time_limit_s)
    if not trains or num_microbatches == 1 or (isinstance(mesh, Devices) and pins):
        return whole(time_limit_s)
    if isinstance(mesh, Mesh):
        return _if_memory_binds(whole, in_stages, limit, time_limit_s)
    return _better(whole, in_stages, time_limit_s, in_one_node=mesh.num_devices <= (cluster.levels[0].size or mesh.num_devices))


def _if_memory_binds(whole: Whole, in_stages: InStages, limit_bytes: float, time_limit_s: float) -> Plan | StagedPlan:
    """Without stages, microbatches and recomputed blocks only save memory."""
    try:
        plan = whole(time_limit_s)
    except InfeasibleError as error:
        try:
            return in_stages(time_limit_s)
        except AutoparError:
            raise error from None
    if plan.costs.total_memory_bytes <= (1 - _FREE) * limit_bytes:
        return plan
    try:
        staged = in_stages(time_limit_s / 2, plan.step_s)
    except AutoparError:  # the batch cannot be cut, there is no loss, or nothing fits
        return plan
    return _worth(staged, plan)


def _better(whole: Whole, in_stages: InStages, time_limit_s: float, *, in_one_node: bool) -> Plan | StagedPlan:
    """On an open mesh: both ways. Within a node plans without stages are searched in any case: stages gain little there, and what people
    write says little of a batch too small to split."""
    failure: AutoparError | None = None
    staged: Plan | StagedPlan | None = None
    try:
        staged = in_stages(_SHARE_OF_STAGES * time_limit_s)
    except AutoparError as error:
        failure = error
    try:
        to_beat_s = math.inf if staged is None or in_one_node else staged.step_s
        plan = whole(time_limit_s if staged is None else (1 - _SHARE_OF_STAGES) * time_limit_s, to_beat_s)
    except InfeasibleError as error:
        if staged is None:
            raise failure if isinstance(failure, InfeasibleError) else error from None
        return staged
    return _worth(staged, plan)


def _worth(other: Plan | StagedPlan | None, plan: Plan) -> Plan | StagedPlan:
    """`other` if it is faster by enough."""
    least = _WORTH if isinstance(other, StagedPlan) else 0.0
    return plan if other is None or other.step_s >= (1 - least) * plan.step_s else other
