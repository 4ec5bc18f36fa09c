"""The plan: where everything is, what that costs, and how good it is."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.roofline import op_time
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.explain.report import report
from autopar.explain.text import format_report
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.print_graph import fingerprint
from autopar.mesh import Devices, Mesh
from autopar.plans import serialise
from autopar.plans.batch_size import too_small
from autopar.plans.equal_runs import as_planned
from autopar.plans.serialise import HandCosts, SavedPlan
from autopar.plans.validate import check_assignment, check_names
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.signature import Candidates


@dataclass(frozen=True)
class Plan:
    """`lower_bound_s`: no `bound_of` of this space within the memory limit has a shorter step, as `costs` prices it (0
    when nothing was proven). bound_of: "plan" for a model without repeated layers; else plans whose inner layers are
    alike, all or in the segments that were searched.

    without_rule: op replicated for want of a rule -> seconds a step that its compute and its conversions take.
    not_divided: (op or input, dim, mesh axis) never split because the axis does not divide the dim. found_by: "search",
    or the hand plan that nothing better was found to (or ""). hand: name -> costs of the hand plans on this mesh.
    meshes: those searched, if the mesh was left open -> step of the best plan. timings: planning stage -> seconds it
    took. peak_bytes: the most that a device has in use at one time, as its program runs; () if nobody asked.
    is_from_file: lower_bound_s, bound_of, found_by, hand and peak_bytes are what a file says; all else is computed on
    reading.
    """

    mesh: Mesh
    cluster: Cluster
    training: Training
    memory_limit_bytes: float
    fingerprint: str
    graph: Graph
    folded: Folded
    assignment: Assignment
    costs: Costs
    lower_bound_s: float
    bound_of: str
    without_rule: Mapping[str, float]
    not_divided: tuple[tuple[str, int, int], ...]
    found_by: str
    hand: Mapping[str, HandCosts]
    meshes: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: tuple[int, ...] = ()
    is_from_file: bool = False

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes of a device as they are estimated; as in `StagedPlan`, of its only rank."""
        return (self.costs.total_memory_bytes,)

    @property
    def gap(self) -> float:
        """Relative distance of the step time to its bound, 0 when proven optimal."""
        return (self.costs.step_s - self.lower_bound_s) / self.costs.step_s if self.costs.step_s > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.costs.step_s

    def without_savings(self) -> Iterator[tuple[str, Costs]]:
        """Each of the plan's choices that save memory, and the costs of the plan without it."""
        for what, changed in (
            ("blocks recomputed", replace(self.assignment, recomputed=())),
            ("what blocks keep moved to the host", replace(self.assignment, offloaded=())),
            ("optimizer state on the host", replace(self.assignment, state_on_host=frozenset())),
            ("parameters gathered again in backward", replace(self.assignment, regathered=frozenset())),
        ):
            if changed != self.assignment:
                yield what, evaluate(self.graph, changed, self.mesh, self.cluster, training=self.training)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know before running the plan, as that the batch is too small for the devices."""
        small = too_small(self)
        return (str(small),) if small else ()

    def explain(self) -> str:
        """The plan for people: every choice, what it costs, and what else there is."""
        return format_report(report(self))

    def dumps(self) -> str:
        """JSON text; the graph is not in it, only its fingerprint."""
        return serialise.signed(serialise.content_of_plan(self))

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON, whole or not at all."""
        serialise.write(path, self.dumps())

    @classmethod
    def loads(cls, text: str, graph: Graph, mesh: Mesh | Devices, *, is_own: bool = False) -> "Plan":
        """The plan that `text` holds, for the model it was made for, on a mesh of the same shape; else PlanError.
        Trusts nothing in it: what cannot be computed again is shown as the file's, unless this run wrote the text
        itself (`is_own`).
        """
        return cls.of_saved(
            serialise.reading(lambda: serialise.read_plan(serialise.fields_of(text))), graph, mesh, is_own=is_own
        )

    @classmethod
    def of_saved(cls, saved: SavedPlan, graph: Graph, mesh: Mesh | Devices, *, is_own: bool) -> "Plan":
        """`loads` of what was read already."""
        mesh = serialise.check_belongs(saved, graph, mesh)
        check_names(saved.assignment, graph)
        folded = as_planned(fold(graph), graph, saved.assignment)
        candidates = annotate(graph, mesh, folded, near=saved.assignment.strategies)
        check_assignment(saved.assignment, graph, folded, candidates, mesh)
        plan = plan_of(
            graph,
            saved.assignment,
            mesh,
            saved.cluster,
            training=saved.training,
            memory_limit_bytes=saved.memory_limit_bytes,
            lower_bound_s=saved.lower_bound_s,
            bound_of=saved.bound_of,
            found_by=saved.found_by,
            hand=saved.hand,
            peak_bytes=saved.peak_bytes,
        )
        return replace(plan, is_from_file=not is_own)

    @classmethod
    def load(cls, path: str | os.PathLike, graph: Graph, mesh: Mesh | Devices) -> "Plan":
        """`loads` of the file at `path`; PlanError if it cannot be read."""
        return cls.loads(serialise.read(path), graph, mesh)


def plan_of(
    graph: Graph,
    assignment: Assignment,
    mesh: Mesh,
    cluster: Cluster,
    *,
    training: Training = WHOLE_BATCH,
    memory_limit_bytes: float = math.inf,
    lower_bound_s: float = 0.0,
    bound_of: str = "plan",
    found_by: str = "",
    hand: Mapping[str, HandCosts] | None = None,
    meshes: Mapping[str, float] | None = None,
    timings: Mapping[str, float] | None = None,
    peak_bytes: tuple[int, ...] = (),
    costs: Costs | None = None,
) -> Plan:
    """The plan that `assignment` is, with its `costs`, which are evaluated if they are not known; nothing is
    searched.
    """
    costs = costs or evaluate(graph, assignment, mesh, cluster, training=training)
    folded = as_planned(fold(graph), graph, assignment)
    candidates = annotate(graph, mesh, folded, near=assignment.strategies)
    return Plan(
        mesh=mesh,
        cluster=cluster,
        training=training,
        memory_limit_bytes=memory_limit_bytes,
        fingerprint=fingerprint(graph),
        graph=graph,
        folded=folded,
        assignment=assignment,
        costs=costs,
        lower_bound_s=min(lower_bound_s, costs.step_s),
        bound_of=bound_of,
        without_rule=_without_rule(graph, folded, candidates, assignment, costs, mesh, cluster),
        not_divided=candidates.not_divided,
        found_by=found_by,
        hand=hand or {},
        meshes=meshes or {},
        timings=timings or {},
        peak_bytes=peak_bytes,
    )


def _without_rule(
    graph: Graph,
    folded: Folded,
    candidates: Candidates,
    assignment: Assignment,
    costs: Costs,
    mesh: Mesh,
    cluster: Cluster,
) -> dict[str, float]:
    """Op without rule -> seconds of it and its repeats: running them and bringing their inputs together."""
    found = dict.fromkeys(candidates.without_rule, 0.0)
    for op in graph.ops:
        if (name := folded.representative[op.name]) in found:
            found[name] += sum(op_time(op, assignment.strategies[op.name], mesh.shape, cluster))
    for planned in costs.collectives:
        names = {folded.representative.get(user) for user in planned.users} & found.keys()
        found.update((name, found[name] + costs.num_issued(planned) * planned.time_s) for name in names)
    return found
