"""The layouts of the boundary tensors of a pipeline, chosen for the fastest step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.costmodel.cluster.device_groups import cluster_of_rank
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import local_bytes
from autopar.costmodel.pricing.options import Stored
from autopar.costmodel.stage_transfer import transfers
from autopar.errors import InfeasibleError
from autopar.ir.folding.fold import value_classes
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.folding.stage_fold import fold_of_stage
from autopar.ir.graph import Value
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.pipeline.cut_stages import Cut, crossing_layouts
from autopar.planner.pipeline.equal_stages import requested_of, wiring_of
from autopar.planner.pipeline.sweep import Staged
from autopar.planner.problem import Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.sbp.candidates import boundary_layouts
from autopar.sbp.placement import Layout
from autopar.sbp.uneven.uneven_extents import shared_extents
from autopar.schedule.simulate import StageTimes, as_array, ordered, step_s
from autopar.search.min_plus.eliminate import Elimination, Limits, eliminate, elimination_order
from autopar.search.min_plus.factors import contract
from autopar.search.min_plus.sparse_core import Core, core
from autopar.search.table import CostTable, Edge, Node

# The search stops if it can gain less than this share of a step.
_WORTH = 5e-3
# An elimination of more additions may take longer than the searches of some boundary layouts.
_LIMITS = Limits(additions=1e8)

Crossing = Mapping[str, Layout]


def choose_crossing(pipeline: "OpenStages") -> dict[str, Layout]:
    """Name of each boundary tensor of the stages -> its layout on their mesh.

    Tensors of one shape that have one layout in the hand plan keep one.

    From the hand plan on, one layout is changed on one axis at a time as long as the step becomes shorter. The step is
    simulated with the best time of each stage for these layouts, without a memory limit. Nothing is tried if even the
    best times for any layouts, with the fewest bytes sent, would not be shorter.
    """
    cut, budget = pipeline.cut, pipeline.budget
    best = crossing_layouts(cut)
    if not best or budget.is_spent:
        return best
    best_s = pipeline.step_s(best)
    if pipeline.least_s() > (1 - _WORTH) * best_s:
        return best
    is_better = True
    while is_better and not budget.is_spent:
        is_better = False
        for names in _alike(cut, best):
            for layout in pipeline.neighbours(names[0], best[names[0]]):
                if budget.is_spent:
                    return best
                other = best | dict.fromkeys(names, layout)
                other_s = pipeline.step_s(other)
                if other_s < (1 - _WORTH) * best_s:
                    best, best_s, is_better = other, other_s, True
    return best


def _alike(cut: Cut, crossing: Crossing) -> list[list[str]]:
    """The boundary tensors, grouped by shape and layout."""
    alike: dict[Any, list[str]] = {}
    for value in _values(cut).values():
        alike.setdefault((replace(value, name=""), crossing[value.name]), []).append(value.name)
    return list(alike.values())


def _values(cut: Cut) -> dict[str, Value]:
    return {value.name: value for stage in cut.stages[:-1] for value in stage.graph.outputs if isinstance(value, Value)}


@dataclass(frozen=True, eq=False)
class _Ends:
    """A stage with its boundary layouts open; `nodes`: of its table, for each value that it receives and sends."""

    setting: Setting
    problem: Problem
    nodes: tuple[int, ...]

    def least_s(self, layouts: tuple[Layout, ...] | None) -> float:
        """Seconds of the fastest choice with these boundary layouts, of any if None; infinity if there is none."""
        chosen = {} if layouts is None else self._options(layouts, self._core.nodes)
        if chosen is None:
            return math.inf
        if self._by_options is None:
            return self._searched_s(chosen)
        apart_s, rest = self._by_options.value, self._by_options.rest
        if layouts is None:
            return apart_s + float(contract(rest, ()).values)
        return apart_s + sum(float(one.values[tuple(chosen[node] for node in one.scope)]) for one in rest)

    @cached_property
    def _core(self) -> Core:
        return core(self.problem.priced.table, kept=frozenset(self.nodes))

    @cached_property
    def _by_options(self) -> Elimination | None:
        """The core with all but `nodes` eliminated, so that its value and its rest, functions of their options, sum to
        the least time for each choice of these; None if that takes too long.
        """
        table = self._core.table
        order = elimination_order(table, _LIMITS, kept=frozenset(map(self._core.nodes.index, self.nodes)))
        return None if order is None else eliminate(table, order)

    def of(self, layouts: tuple[Layout, ...]) -> Problem | None:
        """The problem with these boundary layouts alone; None if one is no option."""
        chosen, priced = self._options(layouts, range(len(self.problem.priced.entities))), self.problem.priced
        if chosen is None:
            return None
        entities: list[Any] = [*priced.entities]
        for node, index in chosen.items():
            entities[node] = replace(entities[node], options=(entities[node].options[index],))
        return replace(
            self.problem, priced=replace(priced, entities=tuple(entities), table=_fixed(priced.table, chosen))
        )

    def _options(self, layouts: tuple[Layout, ...], among: Sequence[int]) -> dict[int, int] | None:
        """Each of `nodes`, by its number `among` others -> its option with the layout; None if one is no option."""
        chosen = {}
        for node, layout in zip(self.nodes, layouts):
            entity = self.problem.priced.entities[node]
            option = Stored(layout) if entity.kind == "input" else layout
            if option not in entity.options:
                return None
            chosen[among.index(node)] = entity.options.index(option)
        return chosen

    def _searched_s(self, chosen: Mapping[int, int]) -> float:
        priced = replace(self.problem.priced, table=_fixed(self._core.table, chosen))
        try:
            return self.setting.search(replace(self.problem, priced=priced), []).cost_s
        except InfeasibleError:  # no choice was found in the time limit
            return math.inf


class OpenStages:
    """The stages of `cut`, that of `point`, on their `mesh` with their boundary layouts open, without a memory limit:
    the step for any of these layouts.

    Each stage (up to isomorphism) is priced once, and searched once for each choice of its boundary layouts.
    """

    def __init__(
        self, cut: Cut, point: Staged, mesh: Mesh, cluster: Cluster, request: PlanRequest, budget: Budget
    ) -> None:
        self.cut, self.schedule, self.mesh, self.cluster = cut, point.schedule, mesh, cluster
        self.training = request.training.staged(self.schedule.num_microbatches, self.schedule.num_ranks)
        self.request = replace(request, training=self.training, memory_limit_bytes=math.inf, memory_share=1.0)
        self.request = replace(self.request, crossing={})
        self.budget = budget
        self.values, self.shared = _values(cut), shared_extents(cut.stages[0].graph, (), mesh)
        self.order, links = ordered(point.schedule), transfers(cluster, point.schedule.num_ranks, mesh.num_devices)
        self.links = [links[self.schedule.rank_of(number)] for number in range(len(cut.stages))]
        self.kinds = [self._kind(number) for number in range(len(cut.stages))] if len(cut.stages) > 1 else [0]
        self.ends: dict[Any, _Ends] = {}
        self.known: dict[Any, float] = {}

    def _kind(self, number: int) -> Any:
        """A key that is equal for isomorphic stages of which the same is asked."""
        graph, schedule = self.cut.stages[number].graph, self.schedule
        own = cluster_of_rank(self.cluster, schedule.rank_of(number), schedule.num_ranks)
        return own, wiring_of(graph), requested_of(graph, self._request(number))

    def neighbours(self, name: str, layout: Layout) -> Iterator[Layout]:
        """The layouts in which a boundary tensor may cross that differ from `layout` on one axis."""
        for other in boundary_layouts(self.values[name].shape, self.mesh.shape, self.shared):
            if sum(a != b for a, b in zip(layout, other)) == 1:
                yield other

    def step_s(self, crossing: Crossing) -> float:
        """Seconds of a step with these boundary layouts."""
        times = [self._stage_s(number, crossing) for number in range(len(self.cut.stages))]
        return self._simulated(times, [self._sent_bytes(number, crossing) for number in range(len(self.cut.stages))])

    def least_s(self) -> float:
        """A lower bound of the step for all boundary layouts."""
        parts = self.mesh.num_devices
        times = [self._stage_s(number, None) for number in range(len(self.cut.stages))]
        return self._simulated(
            times, [sum(self.values[name].num_bytes / parts for name in stage.sends) for stage in self.cut.stages]
        )

    def _simulated(self, times: list[float], sent: list[float]) -> float:
        """Seconds of a step from the time of each stage, a third of it for forward and for each part of backward."""
        sent_s = [link.send_s(num) if num else 0.0 for num, link in zip(sent, self.links)]
        each = [
            StageTimes(time_s / 3, time_s / 3, time_s / 3, ahead_s, back_s, 1 / link.speedup, link.cores)
            for time_s, ahead_s, back_s, link in zip(times, sent_s, [0.0, *sent_s], self.links)
        ]
        return float(step_s(self.order, as_array(each)))

    def _sent_bytes(self, number: int, crossing: Crossing) -> float:
        sent = [self.values[name] for name in self.cut.stages[number].sends]
        return float(sum(local_bytes(x.shape, x.dtype.itemsize, crossing[x.name], self.mesh.shape) for x in sent))

    def problem_of(self, number: int, request: PlanRequest, crossing: Crossing) -> tuple[Setting, Problem] | None:
        """The search problem of a stage isomorphic to this one with the boundary layouts of `crossing`; None if
        `request` asks for other plans than are open here, in time or by what is saved.
        """
        asked = replace(request, training=replace(request.training, num_in_flight=1), crossing={})
        if replace(asked, memory_limit_bytes=math.inf) != self._request(number) or self.budget.is_spent:
            return None
        stage, ends = self.cut.stages[number], self._ends(number)
        problem = ends.of(tuple(crossing[name] for name in (*stage.receives, *stage.sends)))
        return None if problem is None else (ends.setting, problem)

    def _stage_s(self, number: int, crossing: Crossing | None) -> float:
        """Seconds of a stage for a microbatch, with a share of its work once a step; None: least over all layouts."""
        stage, kind = self.cut.stages[number], self.kinds[number]
        layouts = None if crossing is None else tuple(crossing[name] for name in (*stage.receives, *stage.sends))
        if (kind, layouts) not in self.known:
            self.known[kind, layouts] = self._ends(number).least_s(layouts) / self.schedule.num_microbatches
        return self.known[kind, layouts]

    def _ends(self, number: int) -> _Ends:
        if self.kinds[number] not in self.ends:
            self.ends[self.kinds[number]] = self._priced(number)
        return self.ends[self.kinds[number]]

    def _request(self, number: int) -> PlanRequest:
        fqns = {item.fqn for item in self.cut.stages[number].graph.inputs}
        pins, stored = (
            {fqn: layout for fqn, layout in asked.items() if fqn in fqns}
            for asked in (self.request.pins, self.request.stored)
        )
        return replace(self.request, pins=pins, stored=stored)

    def _priced(self, number: int) -> _Ends:
        stage = self.cut.stages[number]
        names = (*stage.receives, *stage.sends)
        own = cluster_of_rank(self.cluster, self.schedule.rank_of(number), self.schedule.num_ranks)
        setting = Setting(stage.graph, self.mesh, own, self._request(number), self.budget)
        folded = fold_of_stage(self.cut.folded, stage.graph, names)
        problem = setting.problem(segmented(folded, stage.graph, ends_apart(folded)))
        node_of = {(entity.kind, entity.name): node for node, entity in enumerate(problem.priced.entities)}
        classes = value_classes(stage.graph, problem.folded)
        received = (node_of["input", classes[name]] for name in stage.receives)
        return _Ends(setting, problem, (*received, *(node_of["output", classes[name]] for name in stage.sends)))


def _fixed(table: CostTable, chosen: Mapping[int, int]) -> CostTable:
    """The table with the options of some nodes fixed."""
    nodes = [
        Node(node.name, node.cost_s[[chosen[number]]], node.memory_bytes[[chosen[number]]])
        if number in chosen
        else node
        for number, node in enumerate(table.nodes)
    ]
    edges = [_of_edge(edge, chosen) if edge.a in chosen or edge.b in chosen else edge for edge in table.edges]
    return replace(table, nodes=tuple(nodes), edges=tuple(edges))


def _of_edge(edge: Edge, chosen: Mapping[int, int]) -> Edge:
    rows, columns = (
        [chosen[node]] if node in chosen else range(size) for node, size in zip((edge.a, edge.b), edge.cost_s.shape)
    )
    at = np.ix_(list(rows), list(columns))
    return Edge(edge.a, edge.b, edge.cost_s[at], edge.memory_bytes[at])
