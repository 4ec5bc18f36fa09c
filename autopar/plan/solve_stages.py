"""The best layouts of each stage of a pipeline that is cut already, searched on the stage's own mesh under its own memory limit."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.hardware import Cluster
from autopar.costmodel.recomputable import recomputable
from autopar.costmodel.saving import Regions
from autopar.errors import InfeasibleError
from autopar.ir.cut import StageGraph
from autopar.ir.fold import Folded, value_classes
from autopar.ir.graph import Graph, Value, nameless
from autopar.ir.segment import segmented
from autopar.ir.wiring import wire
from autopar.ir.within import within
from autopar.mesh import Mesh
from autopar.plan.clock import Clock
from autopar.plan.plan import Plan, plan_of
from autopar.plan.setting import Problem, Setting, Wishes
from autopar.plan.staged import stage_graphs
from autopar.plan.sweep import Model, Staged, in_flight, shares, waiting, with_new
from autopar.sbp.assignment import Assignment, produced_layouts, uses_of
from autopar.sbp.placement import I, Layout, format_layout

# A plan is taken for several stages where it is at most so much slower than one without a memory limit, or made for so few more
# microbatches in flight.
_NEARLY, _LITTLE_TIGHTER = 1.02, 1.25
# Less than this part of the memory limit is not worth another search.
_LITTLE = 0.01


@dataclass(frozen=True, eq=False)
class Cut:
    """A microbatch's graph in stages, and the plan by hand that they start from."""

    graph: Graph
    folded: Folded
    stages: tuple[StageGraph, ...]
    starts: tuple[str, ...]
    by_hand: Assignment
    regions: Regions


def cut_as(model: Model, found: Staged) -> Cut:
    """The stages that a plan of the sweep has."""
    starts = tuple(model.graph.ops[model.starts[block]].name for block in found.partition.starts[1:])
    micro, stages = stage_graphs(model.graph, starts, found.schedule.num_microbatches)
    folded = with_new(model.folded, micro.graph)
    by_hand = _expanded(found.assignment, model, micro.graph, folded)
    return Cut(micro.graph, folded, stages, starts, by_hand, recomputable(folded, micro.graph))


def _expanded(assignment: Assignment, model: Model, graph: Graph, folded: Folded) -> Assignment:
    """The assignment of the shortened microbatch for the whole one."""
    classes = value_classes(graph, folded)
    several = tuple((name, classes[name]) for name, found in uses_of(graph).items() if len(found) > 1)
    short = replace(model.outline.short, whole=graph, folded=folded, several=several)
    return replace(short, graph=_only(graph, assignment)).expand(assignment)


def _only(graph: Graph, assignment: Assignment) -> Graph:
    return replace(graph, ops=tuple(op for op in graph.ops if op.name in assignment.strategies))


def solve_stages(
    cut: Cut, found: Staged, mesh: Mesh, cluster: Cluster, wishes: Wishes, *, time_limit_s: float, clock: Clock
) -> tuple[Plan, ...]:
    """The plans of the stages. InfeasibleError if one cannot be made to fit, which a plan that the sweep has seen to fit should.

    Stages alike in all that matters are searched once. What crosses a cut does so in the layout that the plan by hand has it in. The stages
    of a rank share its memory as they do by hand; what they leave goes to those that it helps.
    """
    solver = _Solver(cut, found, mesh, cluster, wishes, clock, time_limit_s)
    limits = shares(found.partition, found.schedule, wishes.memory_limit_bytes)
    plans = [solver.solve(number, limit) for number, limit in enumerate(limits)]
    if found.schedule.num_stages > found.schedule.num_ranks:
        for rank in range(found.schedule.num_ranks):
            _share_rest(solver, plans, found.schedule.stages_of(rank), wishes.memory_limit_bytes)
    return tuple(plans)


def _share_rest(solver: "_Solver", plans: list[Plan], stages: Sequence[int], limit_bytes: float) -> None:
    """Search again, the slowest first, those of a rank's `stages` that would be faster with more memory, with what all of them leave."""
    for number in sorted(stages, key=lambda number: -plans[number].step_s):
        rest = limit_bytes - sum(plans[other].costs.total_memory_bytes for other in stages)
        if number in solver.bound and rest > _LITTLE * limit_bytes:
            again = solver.solve(number, plans[number].costs.total_memory_bytes + rest)
            plans[number] = again if again.step_s < plans[number].step_s else plans[number]


class _Solver:
    def __init__(
        self, cut: Cut, found: Staged, mesh: Mesh, cluster: Cluster, wishes: Wishes, clock: Clock, time_limit_s: float
    ) -> None:
        self.cut, self.found, self.mesh, self.cluster, self.wishes, self.clock = cut, found, mesh, cluster, wishes, clock
        self.time_limit_s = time_limit_s
        self.crossing = _crossing_layouts(cut)
        self.known: dict[Any, list[_Found]] = {}  # of stages alike, the plan without a memory limit first
        self.failed: dict[Any, float] = {}  # of stages alike, the least pressure under which nothing fitted
        self.bound: set[int] = set()  # stages that the memory limit makes slower
        self.tied: dict[str, str] = {}  # FQN of a parameter of several stages -> its layout on the first

    def solve(self, number: int, limit_bytes: float) -> Plan:
        """The plan of stage `number` within so many bytes."""
        stage = self.cut.stages[number]
        training = replace(
            self.wishes.training,
            num_microbatches=self.found.schedule.num_microbatches,
            num_in_flight=in_flight(self.found.schedule)[number],
            num_waiting=waiting(self.found.schedule)[number],
        )
        fqns = {item.fqn for item in stage.graph.inputs}
        stored = {fqn: layout for fqn, layout in (self.tied | dict(self.wishes.stored)).items() if fqn in fqns}
        crossing = {name: self.crossing[name] for name in (*stage.receives, *stage.sends)}
        pins = {fqn: layout for fqn, layout in self.wishes.pins.items() if fqn in fqns}
        wishes = replace(self.wishes, pins=pins, stored=stored, memory_limit_bytes=limit_bytes, training=training, crossing=crossing)
        best = self._best(stage.graph, wishes, self.found.partition.num_recomputed[number])
        (self.bound.discard if best.is_free else self.bound.add)(number)
        self._remember_tied(stage.graph, best.assignment)
        return plan_of(
            stage.graph, best.assignment, self.mesh, self.cluster, training=training, memory_limit_bytes=limit_bytes, found_by="search"
        )

    def _remember_tied(self, graph: Graph, assignment: Assignment) -> None:
        for item in graph.of_kind("parameter"):
            self.tied.setdefault(item.fqn, format_layout(assignment.layouts[item.value.name]))

    def _best(self, graph: Graph, wishes: Wishes, most_saved: int) -> "_Found":
        """The fastest of a few numbers of blocks that are recomputed, or wait on the host; the most is what the plan by hand recomputes."""
        best: _Found | None = None
        failure: InfeasibleError | None = None
        for asked in self._ways(graph, wishes, most_saved):
            is_last_resort = len(asked.recomputed) == most_saved
            if not is_last_resort and self._is_hopeless(graph, asked):
                continue
            try:
                found = self._saving(graph, asked)
            except InfeasibleError as error:
                self.failed[_shape_of(graph, asked)] = _pressure(wishes)
                failure = error
                continue
            best = found if best is None or found.cost_s < best.cost_s else best
            if found.is_free:
                break  # to save memory only costs time
        if best is None:
            raise failure
        return best

    def _ways(self, graph: Graph, wishes: Wishes, most_saved: int) -> Iterator[Wishes]:
        """The wishes with the first of the graph's blocks recomputed or, where the link to the host is known, on the host meanwhile."""
        own = {op.name for op in graph.ops}
        regions = tuple(region for region in self.cut.regions if region[0] in own)
        nums = tuple(dict.fromkeys((0, most_saved // 2, most_saved)))
        yield from (replace(wishes, recomputed=regions[:num]) for num in nums)
        # A backward in two parts would fetch everything twice.
        if self.cluster.host_bandwidth_bytes_per_s and not wishes.training.num_waiting:
            yield from (replace(wishes, offloaded=regions[:num]) for num in nums if num)

    def _is_hopeless(self, graph: Graph, wishes: Wishes) -> bool:
        """Whether a stage alike with hardly more memory could not be made to fit."""
        return self.failed.get(_shape_of(graph, wishes), math.inf) <= _LITTLE_TIGHTER * _pressure(wishes)

    def _saving(self, graph: Graph, wishes: Wishes) -> "_Found":
        """The best plan with these blocks recomputed or on the host. One for a stage alike under more pressure that fits here too is taken
        if it is nearly as fast as one without a memory limit, since it is the slowest stage that counts."""
        known = self.known.setdefault(_shape_of(graph, wishes), [])
        problem = None
        if not known:
            setting, problem = self._problem(graph, wishes)
            known.append(self._search(setting, _unlimited(problem), wishes))
        free = known[0].for_stage(graph, wishes)
        if self._fits(free, wishes):
            return replace(free, is_free=not (wishes.recomputed or wishes.offloaded))
        pressure = _pressure(wishes)
        alike = [one for one in known[1:] if one.pressure <= _LITTLE_TIGHTER * pressure or one.cost_s <= _NEARLY * free.cost_s]
        fitting = [one for one in (other.for_stage(graph, wishes) for other in alike) if self._fits(one, wishes)]
        if not fitting:
            setting, problem = self._problem(graph, wishes) if problem is None else (setting, problem)
            fitting = [self._search(setting, problem, wishes)]
            known += fitting
        return min(fitting, key=lambda one: one.cost_s)

    def _fits(self, found: "_Found", wishes: Wishes) -> bool:
        costs = evaluate(found.graph, found.assignment, self.mesh, self.cluster, training=wishes.training)
        return costs.total_memory_bytes <= wishes.memory_limit_bytes

    def _problem(self, graph: Graph, wishes: Wishes) -> tuple[Setting, Problem]:
        setting = Setting(graph, self.mesh, self.cluster, wishes, self.time_limit_s, self.clock)
        folded = within(self.cut.folded, graph, wishes.crossing)
        return setting, setting.problem(segmented(folded, graph, _segments(folded, len(wishes.recomputed or wishes.offloaded))))

    def _search(self, setting: Setting, problem: Problem, wishes: Wishes) -> "_Found":
        start = problem.encode(_restricted(self.cut.by_hand, problem.graph, self.crossing))
        choice = setting.search(problem, [start] if start is not None else [])
        return _Found(problem.graph, problem.decode(choice.strategies), choice.cost_s, _pressure(wishes))


def _pressure(wishes: Wishes) -> float:
    """How hard it is to fit: microbatches in flight for each byte of the limit."""
    return wishes.training.num_in_flight / wishes.memory_limit_bytes


def _unlimited(problem: Problem) -> Problem:
    table = replace(problem.priced.table, memory_limit_bytes=float("inf"))
    return replace(problem, priced=replace(problem.priced, table=table))


@dataclass(frozen=True, eq=False)
class _Found:
    """A plan of a stage, searched under such a `pressure`; `is_free`: the limit does not make it slower."""

    graph: Graph
    assignment: Assignment
    cost_s: float
    pressure: float
    is_free: bool = False

    def for_stage(self, graph: Graph, wishes: Wishes) -> "_Found":
        """The same for a stage alike."""
        return replace(self, graph=graph, assignment=_renamed(self.assignment, self.graph, graph, wishes))


def _crossing_layouts(cut: Cut) -> dict[str, Layout]:
    """What crosses a cut, as the plan by hand makes it; whole where its sum, or its gradient's, would be pending."""
    produced = produced_layouts(cut.graph, cut.by_hand)
    names = {name for stage in cut.stages for name in stage.sends}
    return {name: tuple(placement if placement.is_split else I for placement in produced[name]) for name in names}


def _segments(folded: Folded, num_saved: int) -> tuple[tuple[int, ...], ...]:
    """First, inner and last copies apart, and those that are recomputed or offloaded, which are the first, from those that are not."""
    found = []
    for repeat in folded.repeats:
        again = min(num_saved, repeat.count)
        num_saved -= again
        ends = sorted({0, 1, again, repeat.count - 1, repeat.count})
        found.append(tuple(b - a for a, b in pairwise(ends)))
    return tuple(found)


def _restricted(assignment: Assignment, graph: Graph, crossing: Mapping[str, Layout]) -> Assignment:
    """The part of a whole microbatch's assignment that is about one stage."""
    uses = uses_of(graph)
    sent = {value.name: crossing[value.name] for value in graph.outputs if isinstance(value, Value) and value.name in crossing}
    outputs = {v.name: assignment.outputs[v.name] for v in graph.outputs if isinstance(v, Value) and v.name in assignment.outputs}
    layouts = {item.value.name: crossing.get(item.value.name) or assignment.layouts[item.value.name] for item in graph.inputs}
    return Assignment(
        strategies={op.name: assignment.strategies[op.name] for op in graph.ops},
        layouts=layouts,
        kept={name: layout for name, layout in assignment.kept.items() if len(uses.get(name, ())) > 1},
        outputs=outputs | sent,
        regathered=frozenset(name for name in assignment.regathered if name in layouts),
    )


def _shape_of(graph: Graph, wishes: Wishes) -> Any:
    """Equal for stages that are searched alike but for what is in flight: the same ops wired alike, and the same wishes but for names."""
    number = {item.value.name: i for i, item in enumerate(graph.inputs)}
    wired = wire(graph).sources
    wished = [
        (wishes.pins.get(x.fqn), wishes.stored.get(x.fqn), wishes.crossing.get(x.value.name), x.kind, replace(x.value, name=""))
        for x in graph.inputs
    ]
    position = {op.name: i for i, op in enumerate(graph.ops)}
    each = (wishes.recomputed, wishes.offloaded)
    regions = tuple(tuple(tuple(position[name] for name in region) for region in found) for found in each)
    sent = tuple(wishes.crossing.get(value.name) if isinstance(value, Value) else None for value in graph.outputs)
    made = tuple(_place(graph, number, value) for value in graph.outputs)
    ops = tuple(nameless(op) for op in graph.ops)
    return ops, wired, tuple(wished), regions, sent, made


def _place(graph: Graph, inputs: Mapping[str, int], value: Any) -> Any:
    if not isinstance(value, Value):
        return value
    return inputs.get(value.name, (value.shape, value.dtype))


def _renamed(assignment: Assignment, like: Graph, graph: Graph, wishes: Wishes) -> Assignment:
    """The assignment of graph `like` for `graph`, which is the same but for names."""
    names = dict(zip(_names(like), _names(graph)))
    return Assignment(
        strategies={names[name]: strategy for name, strategy in assignment.strategies.items()},
        layouts={names[name]: layout for name, layout in assignment.layouts.items()},
        kept={names[name]: layout for name, layout in assignment.kept.items()},
        outputs={names[name]: layout for name, layout in assignment.outputs.items()},
        regathered=frozenset(names[name] for name in assignment.regathered),
        recomputed=wishes.recomputed,
        offloaded=wishes.offloaded,
    )


def _names(graph: Graph) -> Iterable[str]:
    """Of inputs, ops and values, in an order that graphs alike share; an op and its first value may have the same."""
    yield from (item.value.name for item in graph.inputs)
    for op in graph.ops:
        yield op.name
        yield from (value.name for value in op.outputs)
