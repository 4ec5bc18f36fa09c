"""No point of the sweep fits: a search from the lightest one, and the explanation why no plan in stages fits: its
fullest rank, and the memory of that by kind.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.costmodel.cluster.device_groups import cluster_of_rank
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.evaluate import evaluate
from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.planner.fit_memory import Fit
from autopar.planner.pipeline.cut_stages import crossing_layouts, cut_as, restricted
from autopar.planner.pipeline.hand_points import Model
from autopar.planner.pipeline.stage_times import in_flight, waiting
from autopar.planner.pipeline.sweep import Staged, lightest
from autopar.planner.request import PlanRequest
from autopar.plans.staged_plan import StagedPlan
from autopar.search.deadline import Deadline
from autopar.units import format_bytes

# Kinds of memory that neither fewer samples nor shorter sequences reduce.
_STORED = ("parameters", "casts", "gradients", "optimizer", "buffers", "constants", "gathered")
# The lightest point is searched within limits above this share of what it takes: the search saves a quarter of it
# (bert-large on two devices: 0.76 by the estimate, 0.73 by the peak), and takes ten times as long as the sweep.
_NEAR = 0.7
# A limit of as many bytes as are used, as a share of another one, is those bytes to such a relative precision.
_ROUNDING = 1e-12
# Kinds below this share of the memory are not named.
_NAMED = 0.05


def search_lightest(
    fit: Fit[StagedPlan],
    model: Model,
    meshes: Sequence[tuple[int, Mesh]],
    cluster: Cluster,
    request: PlanRequest,
    search_point: Callable[..., None],
) -> InfeasibleError:
    """Search from the point with the least memory, which does not fit as written; last under as much as it takes by the
    estimate, for the peak may be lower.

    Returns the error for the case that no plan is found or none fits by its peak: it has that memory, or the reason why
    there is no point. `meshes`: (ranks of the pipeline, mesh of a stage), each to be tried until the deadline.
    """
    deadline = fit.budget.deadline
    point = lightest(model, meshes, cluster, request, deadline=deadline)
    most = math.inf if point is None else max(_shares_of_limits(point, request)) * (1 + _ROUNDING)
    shares = (1.0, most) if most * _NEAR <= 1 else ()
    for share in shares if fit.predict else shares[:1]:
        if not fit.waiting:
            search_point(point, request=replace(request, memory_share=share))
    return _refusal(model, meshes, cluster, request, point, deadline)


def _shares_of_limits(point: Staged, request: PlanRequest) -> list[float]:
    """The memory of each rank over its limit."""
    limits = request.rank_limits(point.cluster, point.schedule.num_ranks)
    return [used / limit for used, limit in zip(point.rank_bytes, limits, strict=True)]


def _refusal(
    model: Model,
    meshes: Sequence[tuple[int, Mesh]],
    cluster: Cluster,
    request: PlanRequest,
    point: Staged | None,
    deadline: Deadline,
) -> InfeasibleError:
    num_microbatches, schedule = request.num_microbatches, request.schedule
    if point is None:
        size, ranks = (
            model.num_samples,
            " or ".join(sorted({f"pp={num_ranks} of {mesh} each" for num_ranks, mesh in meshes})),
        )
        return InfeasibleError(
            f"no plan in stages and microbatches can run here: {len(model.starts)} blocks and a batch of {size} on"
            f" {ranks}, with {num_microbatches or 'any number of'} microbatches of schedule {schedule or 'any'}; each"
            " stage needs a block, and each schedule allows certain numbers of microbatches: ask for fewer stages, or"
            " for fewer or more microbatches"
        )
    shares = _shares_of_limits(point, request)
    rank = shares.index(max(shares))
    limit, num_bytes = request.rank_limits(point.cluster, point.schedule.num_ranks)[rank], point.rank_bytes[rank]
    there = f" of rank {rank}" if cluster.groups is not None else ""
    return InfeasibleError(
        f"no plan in stages and microbatches fits in {limit:.0f} bytes ({limit / 2**30:.2f} GiB) per device{there}: the"
        f" lightest hand plan, {point.name}, needs {num_bytes:.0f} bytes ({num_bytes / 2**30:.2f}"
        f" GiB){_with_state_on_host(model, meshes, cluster, request, deadline)};"
        f" {_what_binds(model, point, rank, request)}"
    )


def _with_state_on_host(
    model: Model, meshes: Sequence[tuple[int, Mesh]], cluster: Cluster, request: PlanRequest, deadline: Deadline
) -> str:
    """The text of the least memory with all optimizer state on the host; "" if it must be on the device."""
    if not (cluster.host_bandwidth_bytes_per_s and request.training.has_state):
        return ""
    lighter = replace(request, training=replace(request.training, optimizer="none"))
    point = lightest(model, meshes, cluster, lighter, deadline=deadline)
    if point is None:
        return ""
    num_bytes = max(point.rank_bytes)
    return (
        f", at least {num_bytes:.0f} bytes ({num_bytes / 2**30:.2f} GiB) with all of the optimizer's state on the host"
    )


def _what_binds(model: Model, point: Staged, rank: int, request: PlanRequest) -> str:
    """The text of the memory of the fullest rank by kind, and of the remedy."""
    memory = _memory_bytes(model, point, rank, request)
    total = sum(memory.values())
    named = [(kind, size) for kind, size in memory.most_common() if size >= _NAMED * total]
    counts = " + ".join(str(in_flight(point.schedule)[stage]) for stage in point.schedule.stages_of(rank))
    notes = {"activations": f" (microbatches in flight: {counts})"}
    kinds = ", ".join(f"{kind} {format_bytes(size)}{notes.get(kind, '')}" for kind, size in named)
    if sum(memory[kind] for kind in _STORED) > request.rank_limits(point.cluster, point.schedule.num_ranks)[rank]:
        remedy = "the stored tensors alone exceed the limit for any batch: raise the memory limit, or use more devices"
    else:
        remedy = "raise the memory limit, use more devices, or train on smaller batches or shorter sequences"
    stages = " and ".join(map(str, point.schedule.stages_of(rank)))
    return f"the limit of rank {rank} of the pipeline (stage {stages}) binds, which holds {kinds}; {remedy}"


def _memory_bytes(model: Model, point: Staged, rank: int, request: PlanRequest) -> Counter[str]:
    """Kind of memory -> bytes on a device of the rank, for the hand plan."""
    cut, memory = cut_as(model, point), Counter()
    crossing, training = (
        crossing_layouts(cut),
        replace(request.training, num_microbatches=point.schedule.num_microbatches),
    )
    there = cluster_of_rank(point.cluster, rank, point.schedule.num_ranks)
    for number in point.schedule.stages_of(rank):
        graph = cut.stages[number].graph
        own = {op.name for op in graph.ops}
        regions = tuple(region for region in cut.regions if region[0] in own)[: point.partition.num_recomputed[number]]
        counts = {"num_in_flight": in_flight(point.schedule)[number], "num_waiting": waiting(point.schedule)[number]}
        assignment = replace(restricted(cut.by_hand, graph, crossing), recomputed=regions)
        memory.update(evaluate(graph, assignment, point.mesh, there, training=replace(training, **counts)).memory_bytes)
    return memory
