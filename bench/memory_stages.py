"""Peaks of memory of plans in stages, by rank of the pipeline: the second table of `bench.memory`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autopar.costmodel.activations.count_storages import Storages, count_storages
from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.trace import trace
from autopar.mesh import as_mesh
from autopar.peak_memory.predict import Peak, predict_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import plan_of
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from autopar.runtime.pipeline.torch_stage import RunningStage
from autopar.runtime.pipeline.trainer import Trainer
from bench.report import Row
from tests.runtime.staged import Sample, under
from tests.workers import Ranks

NUM_STEPS = 3
TEXT = """The same for plans in stages with 4 microbatches, of each rank of the pipeline with all its stages:
interleaved has two a rank. Plans are searched in a second, those of "pp=2,dp=2" for CPUs, those of "pp=2,tp=2" for
devices with links that cost nothing, which splits and gathers whatever can be; "recomputed": every block run again
that gains by it. Phases are stage, part (F forward, B backward, I of the inputs, W of the weights) and microbatch.
The estimate is `StagedPlan.memory_bytes`."""
MESHES = ("pp=2,dp=2", "pp=2,tp=2")
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
NUM_MICROBATCHES = 4
RECOMPUTED = "1f1b, recomputed"
RANKS = (0, 1)  # of the pipeline
# Links that cost nothing let the search split whatever can be split.
CLUSTERS = {MESHES[0]: "cpu", MESHES[1]: "free-links"}
KINDS = (*((mesh, schedule) for mesh in MESHES for schedule in SCHEDULES), (MESHES[1], RECOMPUTED))


@dataclass(frozen=True)
class StagesRow:
    """One rank of the pipeline of one plan; measured: of each part of its step, on the one of its devices that has
    most.
    """

    model: str
    mesh: str
    schedule: str
    rank: int
    stages: tuple[int, ...]
    predicted: Peak
    measured: dict[str, int]
    estimated_bytes: int

    @property
    def measured_bytes(self) -> int:
        """The most at one time."""
        return max(self.measured.values())

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted.total_bytes / self.measured_bytes - 1


def staged_plan(case: Sample, mesh: str, schedule: str) -> StagedPlan:
    """A plan in stages as `choose_plan` makes it; `RECOMPUTED`: with every block run again."""
    graph = trace(skeleton(case.model), case.args, case.kwargs)
    request = PlanRequest(
        memory_limit_bytes=math.inf, num_microbatches=NUM_MICROBATCHES, schedule=schedule.split(",")[0]
    )
    plan = choose_plan(graph, as_mesh(mesh), load_cluster(CLUSTERS[mesh]), request)
    assert isinstance(plan, StagedPlan), f"{mesh} has stages"
    if schedule != RECOMPUTED:
        return plan
    again = [replace(one.assignment, recomputed=recomputable(fold(one.graph), one.graph)) for one in plan.stages]
    stages = (plan_of(one.graph, x, one.mesh, one.cluster, training=one.training) for one, x in zip(plan.stages, again))
    return replace(plan, stages=tuple(stages))


def measure_on_rank(case: Sample, plan: StagedPlan) -> dict[str, int]:
    """On every rank: the most bytes in each part of a step, in the step in which that is least."""
    model = under(plan, case)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.train_step(*case.args, **case.kwargs)
    optimizer.step()
    optimizer.zero_grad()
    state = [x for of_parameter in optimizer.state.values() for x in of_parameter.values()]
    batch = [x for x in tree_leaves((case.args, case.kwargs)) if isinstance(x, torch.Tensor)]
    trainer: Trainer = model._autopar.last
    own = [x for x in (*model.parameters(), *model.buffers()) if not isinstance(x, ParameterElsewhere)]
    constants = [x for part in trainer.parts for x in part.loaded.constants.values()]
    phases: dict[str, int] = {}
    with count_storages([*own, *constants, *state, *batch]) as storages:
        for _ in range(NUM_STEPS):
            tell = _teller(storages, phases)
            with _told(trainer, tell):
                model.train_step(*case.args, **case.kwargs)
            tell("reduce")
            optimizer.step()
            tell("update")
            optimizer.zero_grad()
    return phases


def _teller(storages: Storages, phases: dict[str, int]) -> Callable[[str], None]:
    storages.restart()

    def tell(phase: str) -> None:
        most = storages.restart()
        phases[phase] = min(phases.get(phase, most), most)

    return tell


@contextmanager
def _told(trainer: Trainer, tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` when an action is over; what comes before the first is its own too."""

    def told(stage: RunningStage, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(kind: str, microbatch: int, work: Callable[[], Any]) -> Any:
            result = run(kind, microbatch, work)
            tell(f"{stage.stage_index}{kind}{microbatch}")
            return result

        return timed

    for stage in trainer.runner.stages:
        stage._timed = told(stage, stage._timed)
    yield
    for stage in trainer.runner.stages:
        del stage._timed


def measure_stages(ranks: Ranks, name: str, case: Sample, mesh: str, schedule: str) -> list[StagesRow]:
    """A row for each rank of the pipeline."""
    plan = staged_plan(case, mesh, schedule)
    found = ranks.run(measure_on_rank, case, plan, timeout_s=120)
    predicted, each = predict_peaks(plan), len(found) // plan.schedule.num_ranks
    rows = []
    for rank, (peak, estimated) in enumerate(zip(predicted, plan.memory_bytes, strict=True)):
        own = max(found[rank * each : (rank + 1) * each], key=lambda phases: max(phases.values()))
        rows.append(StagesRow(name, mesh, schedule, rank, tuple(plan.schedule.stages_of(rank)), peak, own, estimated))
    return rows


def stages_name(model: str, mesh: str, schedule: str, rank: int) -> str:
    """
    >>> stages_name("gpt2", "pp=2,dp=2", "1f1b", 0)
    'gpt2, pp=2,dp=2, 1f1b, rank 0'
    """
    return f"{model}, {mesh}, {schedule}, rank {rank}"


def table_row(row: StagesRow) -> Row:
    """The row as it is saved."""
    return asdict(row) | {
        "row": stages_name(row.model, row.mesh, row.schedule, row.rank),
        "measured_bytes": row.measured_bytes,
        "predicted_bytes": row.predicted.total_bytes,
        "phase": row.predicted.phase,
        "error_share": row.error,
        "rank_and_stages": f"{row.rank}: {', '.join(map(str, row.stages))}",
    }
