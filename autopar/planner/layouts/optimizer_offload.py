"""The search for optimizer offload: the parameters whose state goes to the host, and the best plan for it.

A byte of state on the host frees a byte of the device and costs p seconds a step, for any parameter. So a plan of t
seconds and b bytes, of which s are optimizer state, takes t + p max(0, b - M) seconds within M bytes, if b - s <= M.
The best of those with b >= M is that of least t + p b under the limit M on b - s, one search of a table; `least_cover`
chooses the parameters. (The bytes that are fetched for the update are few and not part of t + p b.)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.evaluate import Costs, evaluate, with_state_on_host
from autopar.costmodel.state_offload import hostable, moving_s, optimizer_bytes
from autopar.costmodel.training import Training
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.layouts.least_cover import least_cover
from autopar.planner.problem import Problem, Setting
from autopar.sbp.assignment import Assignment
from autopar.search.table import Choice, CostTable, Edge, Node, cost_of, memory_of


@dataclass(frozen=True, eq=False)
class AssignedGraph:
    """One of the graphs that share a device's memory, a stage or the whole graph, with its assignment.

    `costs`: of the assignment, if known.
    """

    graph: Graph
    assignment: Assignment
    training: Training
    costs: Costs | None = None

    @property
    def known(self) -> Costs:
        """`costs` of a part that has them, as all that are `bare` do."""
        assert self.costs is not None, "evaluate the part first"
        return self.costs

    def bare(self, mesh: Mesh, cluster: Cluster) -> "AssignedGraph":
        """The part with all optimizer state on the device, and with costs."""
        if self.costs is not None and not self.assignment.state_on_host:
            return self
        assignment = replace(self.assignment, state_on_host=frozenset())
        return replace(
            self, assignment=assignment, costs=evaluate(self.graph, assignment, mesh, cluster, training=self.training)
        )

    def with_state_on_host(self, names: frozenset[str], mesh: Mesh, cluster: Cluster) -> "AssignedGraph":
        """A bare part with the state of the parameters called `names` on the host."""
        assignment = replace(self.assignment, state_on_host=names)
        costs = with_state_on_host(self.known, self.graph, assignment, mesh, cluster, self.training)
        return replace(self, assignment=assignment, costs=costs)


def fill(
    parts: Sequence[AssignedGraph], mesh: Mesh, cluster: Cluster, limit_bytes: float
) -> tuple[AssignedGraph, ...] | None:
    """The parts, with costs, with the fewest bytes of optimizer state on the host that make them fit together.

    None if they never fit, or if the link to the host is not known.
    """
    filled = bare = tuple(part.bare(mesh, cluster) for part in parts)
    excess = sum(part.known.total_memory_bytes for part in bare) - limit_bytes
    if excess > 0:
        chosen = _chosen(bare, mesh, excess) if cluster.host_bandwidth_bytes_per_s else None
        if chosen is None:
            return None
        filled = tuple(part.with_state_on_host(names, mesh, cluster) for part, names in zip(bare, chosen))
    return filled if sum(part.known.total_memory_bytes for part in filled) <= limit_bytes else None


@dataclass(frozen=True, slots=True)
class _ParameterState:
    """The optimizer state of a parameter: elements of the whole parameter, bytes of state on a device."""

    part: int
    name: str
    num_elements: int
    num_bytes: int


def _chosen(parts: Sequence[AssignedGraph], mesh: Mesh, excess: float) -> list[frozenset[str]] | None:
    """For each part, the parameters of least state that free `excess` bytes and those fetched for the update.

    With several parts, the state is of one part or of all.
    """
    states = [
        _ParameterState(
            number,
            x.value.name,
            math.prod(x.value.shape),
            optimizer_bytes(x, layouts[x.value.name], mesh.shape, part.training),
        )
        for number, part in enumerate(parts)
        for layouts in [part.assignment.layouts]
        for x in hostable(part.graph)
    ]
    best: tuple[int, list[_ParameterState]] | None = None
    for allowed in _allowed(states, len(parts)):
        brought = sum(_brought([one for one in allowed if one.part == number]) for number in range(len(parts)))
        taken = least_cover([one.num_bytes for one in allowed], excess + brought)
        total = sum(allowed[position].num_bytes for position in taken or ())
        if taken and (best is None or total < best[0]):
            best = total, [allowed[position] for position in taken]
    return best and [frozenset(one.name for one in best[1] if one.part == number) for number in range(len(parts))]


def _allowed(states: Sequence[_ParameterState], num_parts: int) -> Iterator[list[_ParameterState]]:
    """The candidate sets: the states of one part or of all, up to each size, since the largest is fetched whole."""
    for numbers in dict.fromkeys([*((number,) for number in range(num_parts)), tuple(range(num_parts))]):
        own = [one for one in states if one.part in numbers]
        for most in sorted({one.num_elements for one in own}):
            yield [one for one in own if one.num_elements <= most]


def _brought(states: Sequence[_ParameterState]) -> int:
    most = max((one.num_elements for one in states), default=0)
    return max((one.num_bytes for one in states if one.num_elements == most), default=0)


def s_per_byte(cluster: Cluster) -> float:
    """The cost of a byte of state on the host, in seconds of a step."""
    return moving_s(1.0, cluster)


def is_worth_moving(table: CostTable, choice: Choice, cluster: Cluster) -> bool:
    """Whether the price of memory at which the search of the table met its limit exceeds that of state on the host.

    If not, the bound that the search proved at its price holds for plans with state on the host as well.
    """
    if choice.around is None or not cluster.host_bandwidth_bytes_per_s:
        return False
    (above_s, above), (within_s, within) = ((cost_of(table, end), memory_of(table, end)) for end in choice.around)
    return within_s - above_s > s_per_byte(cluster) * (above - within)


def with_moves(setting: Setting, problem: Problem) -> Problem:
    """`problem` with the price of its bytes added to its seconds, and with bytes without optimizer state."""
    trained = frozenset(item.value.name for item in hostable(setting.graph))
    given = replace(setting.request.given, state_on_host=trained)
    away = replace(setting, request=replace(setting.request, given=given)).repriced(problem)
    here, there, price = problem.priced.table, away.priced.table, s_per_byte(setting.cluster)
    known: dict[tuple[int, int], np.ndarray] = {}  # shared arrays stay shared

    def in_seconds(one: Node | Edge) -> np.ndarray:
        key = id(one.cost_s), id(one.memory_bytes)
        if key not in known:
            known[key] = one.cost_s + price * one.memory_bytes
        return known[key]

    nodes = tuple(Node(one.name, in_seconds(one), other.memory_bytes) for one, other in zip(here.nodes, there.nodes))
    edges = tuple(replace(edge, cost_s=in_seconds(edge)) for edge in here.edges)
    return replace(away, priced=replace(away.priced, table=replace(there, nodes=nodes, edges=edges)))


@dataclass(frozen=True)
class Solution:
    """A plan with its step and the lower bound that the search proved. `found_by`: as in `Plan`."""

    assignment: Assignment
    step_s: float
    lower_bound_s: float
    found_by: str = "search"


@dataclass(frozen=True)
class HostSearch:
    """The search for the best plan that has optimizer state on the host, or that uses all of the memory limit.

    Its lower bound is that of plans with and without such state. `setting.search(problem, starts)` raises
    InfeasibleError if nothing fits even with all of the state on the host.
    """

    setting: Setting
    problem: Problem

    def solved(self, choice: Choice) -> Solution:
        """The plan of a choice of `problem`."""
        request, place = self.setting.request, (self.setting.mesh, self.setting.cluster)
        part = AssignedGraph(self.setting.graph, self.problem.decode(choice.strategies), request.training)
        filled = fill([part], *place, request.limit_bytes)
        # With all state on the host the plan fits; so it does with less, unless more bytes are fetched at a time.
        (part,) = filled or (part.bare(*place).with_state_on_host(part.assignment.state_on_host, *place),)
        bound_s = choice.lower_bound_s - _s_of_limit(self.setting)
        return Solution(part.assignment, part.known.step_s, max(0.0, bound_s))


def host_search(setting: Setting, problem: Problem) -> HostSearch | None:
    """The search of `problem` with optimizer state on the host; None if no state can be there."""
    if not (
        setting.cluster.host_bandwidth_bytes_per_s and setting.request.training.has_state and hostable(setting.graph)
    ):
        return None
    to_beat_s = setting.to_beat_s + _s_of_limit(setting)
    away = replace(setting, to_beat_s=to_beat_s, what="with all of the optimizer's state on the host: ")
    return HostSearch(away, with_moves(setting, problem))


def _s_of_limit(setting: Setting) -> float:
    """Seconds by which the problems of `with_moves` exceed a step that uses all of the memory limit."""
    return s_per_byte(setting.cluster) * setting.request.limit_bytes
