"""Every plan that a person might write, priced one by one: no point is left out because another should be better."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.stage_transfer import transfers
from autopar.costmodel.training import Training
from autopar.mesh import Mesh
from autopar.planner.handwritten.hand_plan import HandPlan, format_hand_plan
from autopar.planner.pipeline.hand_points import Model, profiled
from autopar.planner.pipeline.partition import Blocks
from autopar.planner.pipeline.stage_times import as_run, time_of
from autopar.planner.pipeline.sweep import Staged
from autopar.planner.stages_by_hand import cut_blocks
from autopar.sbp.assignment import Assignment
from autopar.schedule.orders import Schedule, can_run

CUTS = ("even", "balanced")
RECOMPUTED = ("none", "all", "fewest")
# (schedule, stages a rank)
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 4))


@dataclass(frozen=True)
class Written:
    """One plan: `point` has its layouts, stages, seconds and estimated bytes."""

    name: str
    point: Staged

    @property
    def step_s(self) -> float:
        """Of a step."""
        return self.point.step_s

    @property
    def rank_bytes(self) -> float:
        """The most of a device, as estimated."""
        return max(self.point.rank_bytes)


def every_plan(
    model: Model,
    meshes: Sequence[tuple[int, Mesh]],
    cluster: Cluster,
    *,
    training: Training,
    limit_bytes: float,
    recomputed: Sequence[str] = RECOMPUTED,
) -> Iterator[Written]:
    """Those whose estimate fits, of all numbers of microbatches, flavours, schedules, cuts and ways to recompute.
    meshes: (ranks of the pipeline, mesh of each); tensors are split on the axis called "tp" where axes are called "dp"
    or "tp", else on every choice of axes.
    """
    for num in model.counts:
        for num_ranks, mesh in meshes:
            plans = tuple(plan for plan in _flavours(mesh) if model.num_samples % (num * _data(plan, mesh)) == 0)
            for plan, assignment, blocks in profiled(model, plans, num, mesh, cluster, training):
                if blocks.state_bytes.sum() / num_ranks <= limit_bytes:
                    place = mesh, cluster, num_ranks, num
                    yield from _staged(plan, assignment, *place, blocks, limit_bytes, recomputed)


def _flavours(mesh: Mesh) -> Iterator[HandPlan]:
    """With and without splitting the sequence."""
    named = tuple(axis for axis, name in enumerate(mesh.axis_names) if name == "tp")
    choices = chain.from_iterable(combinations(range(mesh.ndim), count) for count in range(mesh.ndim + 1))
    for axes in (named,) if {"dp", "tp"} & set(mesh.axis_names) else choices:
        has_data = any(size > 1 for axis, size in enumerate(mesh.shape) if axis not in axes)
        for flavour in ("ddp", "zero2", "zero3") if has_data else ("ddp",):
            yield from (HandPlan(axes, is_sp, flavour) for is_sp in ((True, False) if axes else (False,)))


def _data(plan: HandPlan, mesh: Mesh) -> int:
    return math.prod(size for axis, size in enumerate(mesh.shape) if axis not in plan.tensor_axes)


def _staged(
    plan: HandPlan,
    assignment: Assignment,
    mesh: Mesh,
    cluster: Cluster,
    num_ranks: int,
    num: int,
    blocks: Blocks,
    limit_bytes: float,
    recomputed: Sequence[str],
) -> Iterator[Written]:
    links = transfers(cluster, num_ranks, mesh.num_devices)
    for schedule in _schedules(num_ranks, num, len(blocks.forward_s)):
        run = as_run(blocks, schedule)
        own = replace(run, is_recomputable=blocks.is_recomputable)
        for cut in CUTS if num_ranks > 1 else CUTS[1:]:
            for again in recomputed if run.is_recomputable.any() else {"none"} & set(recomputed):
                found = cut_blocks(own, schedule, cut, again, limit_bytes)
                if found is not None:
                    words = (
                        f"pp={num_ranks}",
                        format_hand_plan(plan, mesh),
                        schedule.name,
                        f"m={num}",
                        cut,
                        f"recompute {again}",
                    )
                    step_s = float(time_of(own, found, schedule, links))
                    yield Written(",".join(words), Staged(plan, mesh, schedule, found, step_s, assignment, cluster))


def _schedules(num_ranks: int, num: int, num_blocks: int) -> Iterator[Schedule]:
    if num_ranks == 1:
        yield Schedule("accumulate", 1, 1, num)
        return
    for name, chunks in SCHEDULES:
        if chunks * num_ranks <= num_blocks and can_run(name, chunks * num_ranks, num_ranks, num):
            yield Schedule(name, chunks * num_ranks, num_ranks, num)
