"""The best layouts of each stage of a pipeline that is cut already, searched on
the stage's own mesh under its rank's memory limit.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.costmodel.activations.saved_activations import Regions
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.training import Training
from autopar.errors import InfeasibleError
from autopar.ir.folding.segments import segmented
from autopar.ir.folding.stage_fold import fold_of_stage
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.layouts.optimizer_offload import AssignedGraph, fill, is_worth_moving, with_moves
from autopar.planner.pipeline.cut_stages import Cut, restricted
from autopar.planner.pipeline.equal_stages import wiring_of
from autopar.planner.pipeline.stage_times import in_flight, waiting
from autopar.planner.pipeline.sweep import Staged
from autopar.planner.pipeline.wanted_stages import (
    StagePlans,
    Stages,
    Wanted,
    key_of,
    pressure_of,
    segments,
    side_by_side,
)
from autopar.planner.problem import Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.sbp.placement import Layout, format_layout
from autopar.search.table import memory_of

# A plan is taken for several ranks where it is at most so much slower than one without a memory limit, or made for so
# few more microbatches in flight.
_NEARLY, _LITTLE_TIGHTER = 1.02, 1.25
# Tables of stages that are kept: those of a rank and a few more.
_MOST_KEPT = 8


def solve_stages(solver: "Solver", limits_bytes: Sequence[float], budget: Budget) -> tuple[Plan, ...]:
    """The plans of the stages, those of a rank together within its limit.

    Once the budget is spent, stages are laid out as by hand where that fits. InfeasibleError if one rank's cannot be
    made to fit, which a plan that the sweep has seen to fit should.
    """
    solver.budget = budget
    solved: dict[int, Plan] = {}
    for rank in solver.tightest_first(limits_bytes):
        solved |= solver.solve(rank, limits_bytes[rank])
    return tuple(solved[number] for number in range(len(solver.cut.stages)))


class Solver:
    """The search of the stages of one cut, with a cache of what was searched before; isomorphic ranks are searched
    once.

    `crossing`: boundary tensor -> layout. `may_move_state`: whether optimizer state may be offloaded.
    """

    def __init__(
        self,
        cut: Cut,
        found: Staged,
        mesh: Mesh,
        cluster: Cluster,
        request: PlanRequest,
        crossing: Mapping[str, Layout],
        budget: Budget,
        *,
        may_move_state: bool = True,
    ) -> None:
        self.cut, self.found, self.mesh, self.cluster = cut, found, mesh, cluster
        self.request, self.budget = request, budget
        self.crossing, self.limit_bytes = crossing, request.limit_bytes
        self.may_move_state = may_move_state
        self.solved: dict[tuple[int, float], dict[int, Plan]] = {}  # rank and its limit -> the plans of its stages
        self.free: dict[Any, StagePlans] = {}  # of stages alike, without a memory limit
        self.known: dict[Any, list[StagePlans]] = {}  # of ranks alike, within one
        self.on_host: dict[Any, list[StagePlans]] = {}  # of ranks alike, within one where optimizer state may leave it
        self.failed: dict[Any, float] = {}  # of ranks alike, the least pressure under which nothing fitted
        holders = Counter(item.fqn for stage in cut.stages for item in stage.graph.of_kind("parameter"))
        self.shared = {fqn for fqn, num in holders.items() if num > 1}
        self.is_searched = False  # whether any plan is not as it is by hand
        wirings: dict[Any, int] = {}
        self.wirings = [wirings.setdefault(wiring_of(stage.graph), len(wirings)) for stage in cut.stages]
        self.problems: dict[Any, Problem] = {}  # the latest
        # FQN of a parameter of several stages -> its layout on the first that is solved
        self.tied: dict[str, str] = {}

    def forget(self) -> None:
        """Leave out the plans of all ranks."""
        self.solved, self.tied, self.is_searched = {}, {}, False

    def tightest_first(self, limits_bytes: Sequence[float]) -> list[int]:
        """The ranks, those first of which plans are likely to do for others."""
        stages_of = map(self.found.schedule.stages_of, range(self.found.schedule.num_ranks))
        pressures = [
            pressure_of(map(self._training, stages), limit)
            for stages, limit in zip(stages_of, limits_bytes, strict=True)
        ]
        return sorted(range(len(pressures)), key=lambda rank: -pressures[rank])

    def solve(self, rank: int, limit_bytes: float) -> dict[int, Plan]:
        """The plans of the stages of a rank."""
        if (rank, limit_bytes) not in self.solved:
            self.limit_bytes = limit_bytes
            self.solved[rank, limit_bytes] = self._solve(rank)
        return self.solved[rank, limit_bytes]

    def _solve(self, rank: int) -> dict[int, Plan]:
        numbers = self.found.schedule.stages_of(rank)
        self._tie_within(numbers)
        stages = tuple(map(self._wanted, numbers))
        best = (self._as_written(stages) if self.budget.is_spent else None) or self._best(stages)
        self.is_searched |= best.is_searched
        plans = {}
        for number, (graph, assignment), costs in zip(numbers, best.parts, best.costs or [None] * len(numbers)):
            for item in (item for item in graph.of_kind("parameter") if item.fqn in self.shared):
                self.tied.setdefault(item.fqn, format_layout(assignment.layouts[item.value.name]))
            asked = {"training": self._training(number), "memory_limit_bytes": self.limit_bytes}
            plan = plan_of(graph, assignment, self.mesh, self.cluster, costs=costs, **asked)
            plans[number] = replace(plan, found_by="search")
        return plans

    def _tie_within(self, numbers: Sequence[int]) -> None:
        """Fix tied parameters of several stages of a rank to the layouts of
        the hand plan, since no stage is searched first.
        """
        seen: set[str] = set()
        for number in numbers:
            for item in self.cut.stages[number].graph.of_kind("parameter"):
                if item.fqn in seen:
                    self.tied.setdefault(item.fqn, format_layout(self.cut.by_hand.layouts[item.value.name]))
                seen.add(item.fqn)

    def _training(self, number: int) -> Training:
        schedule = self.found.schedule
        counts = {"num_in_flight": in_flight(schedule)[number], "num_waiting": waiting(schedule)[number]}
        return replace(self.request.training, num_microbatches=schedule.num_microbatches, **counts)

    def _wanted(self, number: int) -> Wanted:
        stage = self.cut.stages[number]
        fqns = {item.fqn for item in stage.graph.inputs}
        stored = {fqn: layout for fqn, layout in (self.tied | dict(self.request.stored)).items() if fqn in fqns}
        pins = {fqn: layout for fqn, layout in self.request.pins.items() if fqn in fqns}
        crossing = {name: self.crossing[name] for name in (*stage.receives, *stage.sends)}
        request = replace(self.request, pins=pins, stored=stored, training=self._training(number), crossing=crossing)
        most_saved = self.found.partition.num_recomputed[number]
        return Wanted(number, stage.graph, self.wirings[number], request, self._regions(stage.graph), most_saved)

    def _best(self, stages: Stages) -> StagePlans:
        """The fastest of a few numbers of blocks that are recomputed, or wait on the host.

        The most is what the plan by hand recomputes.
        """
        best: StagePlans | None = None
        failure: InfeasibleError | None = None
        pressure = pressure_of((one.request.training for one in stages), self.limit_bytes)
        for asked in self._ways(stages):
            if self.is_late or (self.budget.is_spent and (best or failure)):
                break
            is_last_resort = all(len(one.request.recomputed) == one.most_saved for one in asked)
            # Nothing is where ranks alike with hardly more memory could not be made to fit.
            is_hopeless = not is_last_resort and self.failed.get(key_of(asked), math.inf) <= _LITTLE_TIGHTER * pressure
            if is_hopeless and not self.can_move_state:
                continue
            free = self._unlimited(asked)
            if best is not None and free.cost_s >= best.cost_s:
                continue
            free, found = self._priced(free, asked), None
            if self.is_late and not self._fits(free):
                break
            if not is_hopeless:
                try:
                    found = self._saving(asked, free, pressure)
                except InfeasibleError as error:
                    self.failed[key_of(asked)] = pressure
                    failure = error
            for one in (found, self._with_state_on_host(asked, free, pressure, found)):
                best = one if one is not None and (best is None or one.cost_s < best.cost_s) else best
            if found is not None and found.is_free:
                break  # to save memory only costs time
        if best is None:
            best = self._as_written(stages)
        if best is None:
            raise failure or InfeasibleError(
                "no layouts of the stages were found in the time there was; allow more time or memory"
            )
        return best

    @property
    def is_late(self) -> bool:
        """Whether the plan by hand is to do, since the budget is spent: unless
        parameters are stored in layouts that it may not have.
        """
        return self.budget.is_spent and not (self.request.pins or self.request.stored or self.tied)

    def _as_written(self, stages: Stages) -> StagePlans | None:
        """The stages as the plan by hand lays them out, with optimizer state on the host if they fit no other way.

        None if they do not fit, or are to be stored otherwise.
        """
        asked, parts = [], []
        for one in stages:
            own = restricted(self.cut.by_hand, one.graph, self.crossing)
            stored = {item.fqn: format_layout(own.layouts[item.value.name]) for item in one.graph.inputs}
            if any(stored[fqn] != layout for fqn, layout in (*one.request.pins.items(), *one.request.stored.items())):
                return None
            regions = one.regions[: one.most_saved]
            asked.append(replace(one, request=replace(one.request, recomputed=regions)))
            parts.append((one.graph, replace(own, recomputed=regions)))
        written = StagePlans(tuple(parts), math.inf, is_searched=False)
        filled = self._filled([written], tuple(asked))
        is_moved = filled is not None and any(own.state_on_host for _, own in filled.parts)
        return None if is_moved and not self.can_move_state else filled

    def _ways(self, stages: Stages) -> Iterator[Stages]:
        """The stages with the first of their blocks recomputed or, where the link to the host is known, on the host
        meanwhile: none, half of those that the plan by hand recomputes, and as many.
        """
        counts = dict.fromkeys(tuple(one.most_saved * half // 2 for one in stages) for half in range(3))
        for kind in ("recomputed", "offloaded"):
            # A backward in two parts would fetch everything twice.
            if kind == "offloaded" and not (
                self.cluster.host_bandwidth_bytes_per_s and self.found.schedule.name != "zero-bubble"
            ):
                continue
            for nums in counts:
                if kind == "recomputed" or any(nums):
                    yield tuple(_saving(one, kind, one.regions[:num]) for one, num in zip(stages, nums))

    def _regions(self, graph: Graph) -> tuple[tuple[str, ...], ...]:
        own = {op.name for op in graph.ops}
        return tuple(region for region in self.cut.regions if region[0] in own)

    def _saving(self, stages: Stages, free: StagePlans, pressure: float) -> StagePlans:
        """The best plans with these blocks recomputed or on the host, `free` without a memory limit.

        Those of a rank alike under more pressure that fit here too are taken if they are nearly as fast as that, since
        it is the slowest rank that counts.
        """
        if self._fits(free):
            return replace(free, is_free=not any(one.request.recomputed or one.request.offloaded for one in stages))
        known = self.known.setdefault(key_of(stages), [])
        alike = [
            one for one in known if one.pressure <= _LITTLE_TIGHTER * pressure or one.cost_s <= _NEARLY * free.cost_s
        ]
        fitting = [one for one in (self._priced(other.of_others(stages), stages) for other in alike) if self._fits(one)]
        if not fitting:
            fitting = [self._search(stages, self.limit_bytes, pressure)]
            known += fitting
        return min(fitting, key=lambda one: one.cost_s)

    @property
    def can_move_state(self) -> bool:
        """Whether the optimizer has state that may be moved, and there is a way to the host."""
        return bool(
            self.may_move_state and self.cluster.host_bandwidth_bytes_per_s and self.request.training.state_bytes
        )

    def _with_state_on_host(
        self, stages: Stages, free: StagePlans, pressure: float, other: StagePlans | None
    ) -> StagePlans | None:
        """The best plans with these blocks recomputed or offloaded and optimizer state on the host.

        None if there are none, or if `other`, without, is known to be as good. Those of a rank alike, or nearly as fast
        as `free`, without a memory limit, will do.
        """
        if not self.can_move_state or (other is not None and not other.is_short):
            return None
        known = self.on_host.setdefault(key_of(stages), [])
        best = self._filled([free, *known], stages)
        near = (pressure / _LITTLE_TIGHTER, _LITTLE_TIGHTER * pressure)
        if best is None or not (
            best.cost_s <= _NEARLY * free.cost_s or any(near[0] <= one.pressure <= near[1] for one in known)
        ):
            if self.is_late:
                return best
            try:
                known.append(self._search(stages, self.limit_bytes, pressure, is_on_host=True))
            except InfeasibleError:
                return best
            best = self._filled([free, *known], stages)
        return best

    def _filled(self, found: Iterable[StagePlans], stages: Stages) -> StagePlans | None:
        """The fastest of these with as much optimizer state on the host as must be; None if none can be made to fit."""
        best: StagePlans | None = None
        for one in (other if other.costs else other.of_others(stages) for other in found):
            known = zip(one.parts, stages, one.costs or [None] * len(stages))
            parts = [AssignedGraph(graph, own, wanted.request.training, costs) for (graph, own), wanted, costs in known]
            made = fill(parts, self.mesh, self.cluster, self.limit_bytes) or ()
            cost_s = sum(part.known.step_s for part in made)
            if made and (best is None or cost_s < best.cost_s):
                pairs, costs = tuple((part.graph, part.assignment) for part in made), tuple(part.known for part in made)
                best = replace(one, parts=pairs, cost_s=cost_s, costs=costs)
        return best

    def _unlimited(self, stages: Stages) -> StagePlans:
        """The best plans without a memory limit, each stage for itself."""
        found = []
        for one in stages:
            key = key_of((one,))
            if key not in self.free:
                self.free[key] = self._search((one,), math.inf, 0.0)
            found.append(self.free[key].of_others((one,)))
        return StagePlans(tuple(part for one in found for part in one.parts), sum(one.cost_s for one in found))

    def _priced(self, found: StagePlans, stages: Stages) -> StagePlans:
        """With what the plans take together, by the tables of the stages."""
        memory_bytes = 0.0
        for (_, own), one in zip(found.parts, stages):
            problem = self._problem(one)
            choice = problem.encode(own)
            memory_bytes += math.inf if choice is None else memory_of(problem.priced.table, choice)
        return replace(found, memory_bytes=memory_bytes)

    def _fits(self, found: StagePlans) -> bool:
        return found.memory_bytes <= self.limit_bytes

    def _search(self, stages: Stages, limit_bytes: float, pressure: float, *, is_on_host: bool = False) -> StagePlans:
        """The stages' tables side by side under one limit.

        is_on_host: those of `with_moves`, whose seconds are not those of a step.
        """
        settings = [self._setting(one) for one in stages]
        problems = [self._problem(one) for one in stages]
        if is_on_host:
            problems = [with_moves(*each) for each in zip(settings, problems)]
        starts = [problem.encode(restricted(self.cut.by_hand, problem.graph, self.crossing)) for problem in problems]
        start = () if None in starts else tuple(index for one in starts if one is not None for index in one)
        table = side_by_side([problem.priced.table for problem in problems], limit_bytes)
        joint = replace(problems[0], priced=replace(problems[0].priced, table=table))
        choice = settings[0].search(joint, [start] if start else [])
        parts, first = [], 0
        for problem in problems:
            last = first + len(problem.priced.table.nodes)
            parts.append((problem.graph, problem.decode(choice.strategies[first:last])))
            first = last
        return StagePlans(tuple(parts), choice.cost_s, pressure, is_short=is_worth_moving(table, choice, self.cluster))

    def _setting(self, one: Wanted) -> Setting:
        return Setting(one.graph, self.mesh, self.cluster, one.request, self.budget)

    def _problem(self, one: Wanted) -> Problem:
        """The stage's table; the latest ones are kept."""
        request = one.request
        saved = len(request.recomputed or request.offloaded)
        key = one.number, saved, bool(request.offloaded), request.training, tuple(request.stored.items())
        if key not in self.problems:
            if len(self.problems) >= _MOST_KEPT:
                del self.problems[next(iter(self.problems))]
            folded = fold_of_stage(self.cut.folded, one.graph, request.crossing)
            self.problems[key] = self._setting(one).problem(segmented(folded, one.graph, segments(folded, saved)))
        return self.problems[key]


def _saving(stage: Wanted, kind: str, regions: Regions) -> Wanted:
    """The stage with its `regions` "recomputed", or else "offloaded"."""
    request = stage.request
    is_recomputed = kind == "recomputed"
    asked = replace(request, recomputed=regions) if is_recomputed else replace(request, offloaded=regions)
    return replace(stage, request=asked)
