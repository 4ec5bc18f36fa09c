"""The plan of a graph without stages: its assignment, predicted costs and lower bound."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.roofline import op_time
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.print_graph import fingerprint
from autopar.mesh import Devices, Mesh, SeenShares
from autopar.plans import serialise
from autopar.plans.base_plan import BasePlan
from autopar.plans.seen_rank import slowest
from autopar.plans.serialise import HandCosts, SavedPlan
from autopar.plans.validate import check_assignment, check_names
from autopar.sbp.analysis.equal_runs import as_planned
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate, not_divided
from autopar.sbp.signature import Candidates, Discovery


@dataclass(frozen=True)
class Plan(BasePlan):
    """An assignment for a graph and a mesh, with its predicted costs and what the search has proven of it.

    lower_bound_s: no `bound_of` of this space within the memory limit has a shorter step, as `costs` prices it (0
    when nothing was proven). bound_of: "plan" for a model without repeated layers; else plans whose inner layers are
    alike, all or in the segments that were searched.

    found_by: "search", or the hand plan that nothing better was found to (or ""). hand: name -> costs of the hand plans
    on this mesh.
    meshes: searched mesh, if the mesh was left open -> seconds a step of its best plan. timings: planning stage ->
    seconds it took. peak_bytes: the most that a device has in use at one time, as its program runs; () if nobody asked.
    is_from_file: lower_bound_s, bound_of, found_by, hand and peak_bytes are what a file says; all else is computed on
    reading.
    """

    SAVED = SavedPlan

    mesh: Mesh
    cluster: Cluster
    training: Training
    memory_limit_bytes: float
    fingerprint: str
    graph: Graph
    assignment: Assignment
    costs: Costs
    lower_bound_s: float = 0.0
    bound_of: str = "plan"
    found_by: str = ""
    hand: Mapping[str, HandCosts] = field(default_factory=dict)
    meshes: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: tuple[int, ...] = ()
    is_from_file: bool = False

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """The estimate of a device's memory, for the only rank of the pipeline, as in `StagedPlan`."""
        return (self.costs.total_memory_bytes,)

    @property
    def rank_limits_bytes(self) -> tuple[float, ...]:
        """The memory limit of a device, for the only rank of the pipeline, as in `StagedPlan`."""
        return (self.memory_limit_bytes,)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.costs.step_s

    @cached_property
    def folded(self) -> Folded:
        """The classes of ops and inputs that have equal choices."""
        return as_planned(fold(self.graph), self.graph, self.assignment)

    @cached_property
    def _candidates(self) -> Candidates:
        return annotate(self.graph, self.mesh, self.folded, near=self.assignment.strategies)

    @cached_property
    def not_divided(self) -> tuple[tuple[str, int, int], ...]:
        """(op or input, dim, mesh axis) never split because the axis does not divide the dim."""
        return not_divided(self.graph, self.mesh, self.folded)

    @cached_property
    def without_rule(self) -> dict[str, float]:
        """Op without a rule -> seconds a step that it and its copies take, for their compute and the gathers of their
        inputs.
        """
        same, costs = self.folded.representative, self.costs
        seconds = dict.fromkeys(self._candidates.without_rule, 0.0)
        for op in self.graph.ops:
            if (name := same[op.name]) in seconds:
                seconds[name] += sum(op_time(op, self.assignment.strategies[op.name], self.mesh.shape, self.cluster))
        for planned in costs.collectives:
            for name in {same.get(user, "") for user in planned.users} & seconds.keys():
                seconds[name] += costs.num_issued(planned) * planned.time_s
        return seconds

    @property
    def discovered(self) -> Mapping[str, Discovery]:
        """Op without a rule -> what running it on samples says of it; of ops that are to stay whole nothing."""
        return self._candidates.discovered

    def __post_init__(self) -> None:
        object.__setattr__(self, "lower_bound_s", min(self.lower_bound_s, self.costs.step_s))

    @classmethod
    def of_saved(cls, saved: "SavedPlan | Plan", graph: Graph, mesh: Mesh | Devices, *, is_own: bool) -> "Plan":
        """The plan with the choices of `saved`; PlanError if they are invalid for this graph and mesh."""
        graph = saved.training.reduced(graph)
        mesh = serialise.check_belongs(saved, graph, mesh)
        check_names(saved.assignment, graph)
        folded = as_planned(fold(graph), graph, saved.assignment)
        candidates = annotate(graph, mesh, folded, near=saved.assignment.strategies)
        check_assignment(saved.assignment, graph, folded, candidates, mesh)
        place = {"training": saved.training, "memory_limit_bytes": saved.memory_limit_bytes}
        return replace(
            plan_of(graph, saved.assignment, mesh, saved.cluster, **place),
            lower_bound_s=saved.lower_bound_s,
            bound_of=saved.bound_of,
            found_by=saved.found_by,
            hand=saved.hand,
            peak_bytes=saved.peak_bytes,
            is_from_file=not is_own,
        )


def plan_of(
    graph: Graph,
    assignment: Assignment,
    mesh: Mesh,
    cluster: Cluster,
    *,
    training: Training = WHOLE_BATCH,
    memory_limit_bytes: float = math.inf,
    costs: Costs | None = None,
) -> Plan:
    """The plan of an assignment without a search. costs: those of the assignment, None to evaluate them.

    On a cluster of groups of devices it is as the slowest group sees it, unless mesh and cluster are those of a group.
    """
    if cluster.groups is not None and not _is_seen(mesh, cluster):
        seen = slowest(graph, assignment, mesh, cluster, training)
        mesh, cluster, assignment, costs = seen.mesh, seen.cluster, seen.assignment, seen.costs
    costs = costs or evaluate(graph, assignment, mesh, cluster, training=training)
    return Plan(
        mesh=mesh,
        cluster=cluster,
        training=training,
        memory_limit_bytes=memory_limit_bytes,
        fingerprint=graph.once(fingerprint),
        graph=graph,
        assignment=assignment,
        costs=costs,
    )


def _is_seen(mesh: Mesh, cluster: Cluster) -> bool:
    """Whether the figures of a cluster of groups, and the shares, are those of one group."""
    assert cluster.groups is not None, "a cluster of groups"
    return cluster.groups.seen >= 0 and all(isinstance(rows, SeenShares) for _, rows in mesh.shares)
