"""The search of the stages of a rank as a task, and the tables that it searches under the memory limit they share."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.evaluate import Costs
from autopar.ir.folding.fold import Folded
from autopar.ir.folding.segments import Segments, segmented
from autopar.ir.folding.stage_fold import fold_of_stage
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.layouts.optimizer_offload import with_moves
from autopar.planner.layouts.two_groups import mixture, two_groups
from autopar.planner.pipeline.boundary_layouts import OpenStages
from autopar.planner.pipeline.cut_stages import Cut
from autopar.planner.pipeline.equal_stages import wiring_of
from autopar.planner.pipeline.sweep import Staged
from autopar.planner.pipeline.wanted_stages import StagePlans, Stages, Wanted, segments, side_by_side
from autopar.planner.problem import ENOUGH_GAP, Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import Layout
from autopar.search.table import Choice, CostTable, memory_of

# Tables of stages that are kept: those of a rank and a few more.
_MOST_KEPT = 8
# The relative gap of a search without a memory limit that has ended.
_EXACT = 1e-9


@dataclass(frozen=True, eq=False)
class CutTask:
    """The stages of one cut of `point`, to be searched on their own `mesh`.

    `crossing`: boundary tensor -> layout; `opened`: the stages with these open. `may_move_state`: whether optimizer
    state may be offloaded. `must_save`: whether plans that recompute and offload no activations are known already.
    """

    cut: Cut
    point: Staged
    mesh: Mesh
    cluster: Cluster
    request: PlanRequest
    crossing: Mapping[str, Layout]
    opened: OpenStages
    may_move_state: bool = True
    must_save: bool = False

    @cached_property
    def shared(self) -> frozenset[str]:
        """FQNs of the parameters of several stages."""
        holders = Counter(item.fqn for stage in self.cut.stages for item in stage.graph.of_kind("parameter"))
        return frozenset(fqn for fqn, num in holders.items() if num > 1)

    @cached_property
    def wirings(self) -> tuple[int, ...]:
        """A number for each stage, equal for isomorphic stages."""
        if len(self.cut.stages) == 1:
            return (0,)
        numbers: dict[Any, int] = {}
        return tuple(numbers.setdefault(wiring_of(stage.graph), len(numbers)) for stage in self.cut.stages)

    @property
    def can_move_state(self) -> bool:
        """Whether the optimizer has state that may be offloaded, and there is a way to the host."""
        return bool(self.may_move_state and self.cluster.host_bandwidth_bytes_per_s and self.request.training.has_state)


@dataclass(frozen=True)
class SolvedStages:
    """Plans of stages, in order. `is_searched`: whether any of them differs from the hand plan."""

    plans: tuple[Plan, ...]
    is_searched: bool


@dataclass(eq=False)
class StageCache:
    """Results of searches for one `CutTask`, which later searches under other limits read.

    `solved`: (rank, its limit) -> plans of its stages, which agree on `tied`: FQN of a parameter of several stages ->
    its layout on the first that was solved. By keys of isomorphic ranks (`key_of`): `free`, plans without a memory
    limit; `known`, plans within one; `on_host`, plans within one that offload optimizer state; `failed`, the least
    pressure under which nothing fitted. `problems`: the latest tables. `folds`: of the stages, by their numbers.
    `costs`: of plans of isomorphic stages, by these and what is in flight, the assignment of the first and what it
    costs.
    """

    solved: dict[tuple[int, float], SolvedStages] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    free: dict[Any, StagePlans] = field(default_factory=dict)
    known: dict[Any, list[StagePlans]] = field(default_factory=dict)
    on_host: dict[Any, list[StagePlans]] = field(default_factory=dict)
    failed: dict[Any, float] = field(default_factory=dict)
    problems: dict[Any, Problem] = field(default_factory=dict)
    folds: dict[int, Folded] = field(default_factory=dict)
    costs: dict[Any, tuple[Assignment, Costs]] = field(default_factory=dict)
    by_cluster: dict[Cluster, "StageCache"] = field(default_factory=dict)

    def of(self, cluster: Cluster) -> "StageCache":
        """The cache of the ranks of one of several groups of devices: isomorphic stages cost as much on these alone."""
        return self.by_cluster.setdefault(cluster, StageCache(self.solved, self.tied))

    @property
    def least_s(self) -> float:
        """Seconds that the only stage of the only rank takes at least, whatever is saved; 0 if no search has proven it.

        To recompute or to offload blocks costs time, so that a search that does neither, without a limit, proves it.
        """
        free = (one for one in self.free.values() if not any(own.recomputed or own.offloaded for _, own in one.parts))
        return max((one.lower_bound_s for one in free if one.cost_s <= (1 + _EXACT) * one.lower_bound_s), default=0.0)


@dataclass(frozen=True, eq=False)
class RankTask:
    """The search of the stages of one rank, within its memory limit and the budget.

    `to_beat_s`: stages that take as long or longer in a step are not needed.
    """

    task: CutTask
    cache: StageCache
    limit_bytes: float
    budget: Budget
    to_beat_s: float = math.inf

    @property
    def is_late(self) -> bool:
        """Whether the hand plan is to do, since the budget is spent: unless
        parameters are stored in layouts that it may not have.
        """
        request = self.task.request
        return self.budget.is_spent and not (request.pins or request.stored or request.excluded or self.cache.tied)


@dataclass(frozen=True, eq=False)
class StageTables:
    """The `problems` of a rank's stages side by side, under one limit. `setting`: of the search."""

    setting: Setting
    problems: tuple[Problem, ...]
    limit_bytes: float

    @cached_property
    def joint(self) -> Problem:
        """The tables as one, in a problem to be searched."""
        table = side_by_side([problem.priced.table for problem in self.problems], self.limit_bytes)
        return replace(self.problems[0], priced=replace(self.problems[0].priced, table=table))

    @property
    def table(self) -> CostTable:
        """The tables as one."""
        return self.joint.priced.table

    def decode(self, strategies: tuple[int, ...]) -> tuple[Assignment, ...]:
        """The assignment of each stage in a choice."""
        parts, first = [], 0
        for problem in self.problems:
            last = first + len(problem.priced.table.nodes)
            parts.append(problem.decode(strategies[first:last]))
            first = last
        return tuple(parts)

    def encode(self, known: Iterable[Sequence[Assignment]]) -> list[tuple[int, ...]]:
        """The choices for assignments of the stages, without those that have no choice."""
        choices = []
        for parts in known:
            starts = [problem.encode(own) for problem, own in zip(self.problems, parts, strict=True)]
            if None not in starts:
                choices.append(tuple(index for one in starts if one is not None for index in one))
        return choices

    def share_above(self, choice: Choice) -> float | None:
        """The share of the copies of blocks that the limit allows to be as in the choice above it.

        None if plans whose copies are in two groups gain nothing: `choice` is good enough, or the limit does not bind.
        """
        if choice.around is None or choice.gap <= ENOUGH_GAP or choice.lower_bound_s >= self.setting.to_beat_s:
            return None
        over_bytes, within_bytes = (memory_of(self.table, end) for end in choice.around)
        return (self.limit_bytes - within_bytes) / (over_bytes - within_bytes)


def tables_of(
    setting: Setting,
    at: RankTask,
    stages: Stages,
    limit_bytes: float,
    *,
    is_on_host: bool = False,
    share: float | None = None,
) -> StageTables:
    """The tables of the stages, with a `share` of the copies in a group of their own."""
    problems = [problem_of(at, one, share) for one in stages]
    if is_on_host:
        problems = [with_moves(setting_of(at, one), problem) for one, problem in zip(stages, problems)]
    return StageTables(setting, tuple(problems), limit_bytes)


def setting_of(at: RankTask, one: Wanted) -> Setting:
    """The search of one stage."""
    return Setting(one.graph, at.task.mesh, at.task.cluster, one.request, at.budget)


def segments_of(at: RankTask, one: Wanted) -> tuple[Folded, Segments]:
    """The fold of a stage, and the usual segments of its copies."""
    folds = at.cache.folds
    if one.number not in folds:
        folds[one.number] = fold_of_stage(at.task.cut.folded, one.graph, one.request.crossing)
    return folds[one.number], segments(folds[one.number], one.num_saved)


def mixed_copies(at: RankTask, one: Wanted, share: float, above: Assignment, within: Assignment) -> Assignment:
    """`within` with a `share` of the copies of each segment as in `above`."""
    return mixture(one.graph, *segments_of(at, one), share, above, within)


def problem_of(at: RankTask, one: Wanted, share: float | None = None) -> Problem:
    """The stage's table, with a `share` of the copies of each segment in a group of their own; the latest ones are
    kept.
    """
    request = one.request
    key = (
        one.number,
        one.num_saved,
        bool(request.given.offloaded),
        request.training,
        tuple(request.stored.items()),
        share,
    )
    if key not in at.cache.problems:
        if len(at.cache.problems) >= _MOST_KEPT:
            del at.cache.problems[next(iter(at.cache.problems))]
        folded, apart = segments_of(at, one)
        apart = apart if share is None else two_groups(apart, share)
        at.cache.problems[key] = setting_of(at, one).problem(segmented(folded, one.graph, apart))
    return at.cache.problems[key]
