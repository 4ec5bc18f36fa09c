"""`Choices`: the choices of a plan for a graph of other sizes; their costs are computed when somebody asks for them."""

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.costmodel.cluster.hardware import Cluster
from autopar.errors import AutoparError
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.plans.fit_assignment import fit_assignment
from autopar.plans.plan import Plan, plan_of
from autopar.plans.validate import check_assignment, check_names
from autopar.sbp.analysis.equal_runs import as_planned
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate


@dataclass(frozen=True)
class Choices:
    """The decisions of `known`, a plan of the same model, for `graph`; nothing is proven or predicted of them.

    To price a plan takes as long as to check it, and a call that has a new size needs no price.
    """

    known: Plan
    graph: Graph
    assignment: Assignment

    @classmethod
    def of(cls, known: Plan, graph: Graph) -> "Choices":
        """The same choices for a graph with the same names and other shapes; where a dim does not divide then, the
        nearest ones. PlanError or ValueError if there are none.
        """
        try:
            return cls._checked(known, graph, known.assignment)
        except (AutoparError, ValueError):
            return cls._checked(known, graph, fit_assignment(known.assignment, graph, known.mesh))

    @classmethod
    def _checked(cls, known: Plan, graph: Graph, assignment: Assignment) -> "Choices":
        graph = known.training.reduced(graph)
        check_names(assignment, graph)
        folded = as_planned(fold(graph), graph, assignment)
        candidates = annotate(graph, known.mesh, folded, near=assignment.strategies)
        check_assignment(assignment, graph, folded, candidates, known.mesh)
        return cls(known, graph, assignment)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.known.mesh

    @property
    def cluster(self) -> Cluster:
        """The cluster of the plan."""
        return self.known.cluster

    @property
    def has_known_assignment(self) -> bool:
        """Whether all choices are those of the plan."""
        return self.assignment is self.known.assignment

    @cached_property
    def plan(self) -> Plan:
        """The plan with these choices."""
        known = self.known
        place = {"training": known.training, "memory_limit_bytes": known.memory_limit_bytes}
        plan = plan_of(self.graph, self.assignment, known.mesh, known.cluster, **place)
        return replace(plan, bound_of=known.bound_of, found_by=known.found_by, is_from_file=known.is_from_file)
