"""The search problem of one mesh: from a fold to a priced table, and from that to the cheapest choice."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.overlap.pass_time import has_overlap
from autopar.costmodel.overlap.path_weights import IN_TURN, MicrobatchWeights, Paths, StepWeights
from autopar.costmodel.pricing.encode_decode import Members, decode, encode_members, members_of
from autopar.costmodel.pricing.price import Priced, PricedStep, price
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.pin_conflict import binding_pins
from autopar.planner.request import PlanRequest
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.pins import restrict, without
from autopar.sbp.placement import Layout
from autopar.sbp.signature import Candidates
from autopar.search.bounds.drop_edges import tractable
from autopar.search.bounds.lagrange import least_memory
from autopar.search.min_plus.eliminate import Limits
from autopar.search.solve import is_small, solve
from autopar.search.table import Choice

# The relative gap at which a search under a memory limit ends: the last half per cent often takes far longer to prove
# than all before, and changes nothing.
ENOUGH_GAP = 5e-3
# The number of axes on which an op may differ from the plan at the centre of a neighbourhood.
NEAR_AXES = 2


@dataclass(frozen=True)
class Problem:
    """A search problem: a cost table, and the graph, fold and candidates that it belongs to."""

    graph: Graph
    folded: Folded
    everything: Candidates
    priced: Priced

    def encode(self, assignment: Assignment) -> tuple[int, ...] | None:
        """The choice of the table for an assignment; None if a pin forbids it."""
        try:
            return encode_members(self.priced, self._members, assignment)
        except PlanError:
            return None

    @cached_property
    def _members(self) -> Members:
        return members_of(self.graph, self.folded)

    def decode(self, strategies: tuple[int, ...]) -> Assignment:
        return decode(self.priced, self.graph, self.folded, strategies)


@dataclass(frozen=True)
class Setting:
    """A task of searching one mesh: graph, mesh, cluster, request and budget."""

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    request: PlanRequest
    budget: Budget
    near: Assignment | None = None  # search only assignments that differ from it on few axes
    to_beat_s: float = float("inf")  # plans that are not faster are not needed
    what: str = ""  # the kind of plans that are searched, which errors name
    paths: Paths | None = None  # through both passes, whose lengths are priced instead of all that they do in turn
    microbatch: MicrobatchWeights = IN_TURN.microbatch  # of paths through the stages, of which this is the whole

    def problem(self, folded: Folded) -> Problem:
        """The search problem with one decision for each class of `folded`."""
        near = None if self.near is None else self.near.strategies
        self.budget.show("folded", folded)
        with self.budget.timed("annotate"):
            everything = annotate(self.graph, self.mesh, folded, near=near, num_changed=NEAR_AXES)
            wanted = {name: (layout,) for name, layout in self.request.outputs.items()}
            everything = replace(everything, outputs={**everything.outputs, **wanted})
        self.budget.show("candidates", everything)
        with self.budget.timed("price"):
            priced = self._price(folded, everything, self.request.pins)
        self.budget.show("priced", priced.table)
        return Problem(self.graph, folded, everything, priced)

    def _price(self, folded: Folded, everything: Candidates, pins: Mapping[str, str]) -> Priced:
        candidates = restrict(everything, self.graph, {**pins, **self.request.stored}, self.mesh, folded)
        candidates = without(candidates, self.request.excluded, folded)
        candidates = _with_crossing(candidates, self.request.crossing)
        request, weights = self.request, self._weights(folded)
        return price(
            self.graph,
            folded,
            candidates,
            self.mesh,
            self.cluster,
            PricedStep(request.training, request.given, weights),
            memory_limit_bytes=request.limit_bytes,
        )

    def _weights(self, folded: Folded) -> StepWeights:
        if self.paths is not None:
            return self.paths.weights(self.graph, folded)
        return replace(IN_TURN, microbatch=self.microbatch)

    @property
    def has_overlap(self) -> bool:
        """Whether a plan takes less than its parts in turn, so that no table has its time."""
        return has_overlap(self.cluster, self.request.training)

    def costs(self, assignment: Assignment) -> Costs:
        """The costs of a plan, overlap included."""
        return evaluate(self.graph, assignment, self.mesh, self.cluster, training=self.request.training)

    def repriced(self, problem: Problem) -> Problem:
        """The problem of another setting of the same graph, priced under this setting's request."""
        with self.budget.timed("price"):
            return replace(problem, priced=self._price(problem.folded, problem.everything, self.request.pins))

    def search(self, problem: Problem, starts: list[tuple[int, ...]], *, is_brief: bool = False) -> Choice:
        """The cheapest choice of `problem` from `starts`; `is_brief`: as in `solve`.

        InfeasibleError with the remedy.
        """
        try:
            with self.budget.timed("search"):
                choice = solve(
                    problem.priced.table,
                    starts=starts,
                    deadline=self.budget.deadline,
                    enough_gap=ENOUGH_GAP,
                    is_brief=is_brief,
                    to_beat_s=self.to_beat_s,
                    progress=self.budget.tell_cost,
                )
        except InfeasibleError as error:
            raise InfeasibleError(f"{self.what}{error}{self._remedy(problem)}") from error
        self.budget.show("choice", choice)
        return choice

    def too_slow(self, problem: Problem) -> Choice | None:
        """The cheapest choice of all if it is no faster than `to_beat_s`, and within the memory limit; else, or if it
        is not soon known, None. A search without the limit takes a quarter of the time.
        """
        table = problem.priced.table
        if self.to_beat_s == float("inf") or self.has_overlap or self.budget.is_spent or not is_small(table):
            return None
        with self.budget.timed("search"), suppress(InfeasibleError):  # there was no time
            free = solve(replace(table, memory_limit_bytes=float("inf")), deadline=self.budget.deadline)
            fits = free.memory_bytes <= table.memory_limit_bytes
            return free if fits and free.lower_bound_s >= self.to_beat_s and not free.gap > ENOUGH_GAP else None
        return None

    def _remedy(self, problem: Problem) -> str:
        def least_bytes(pins: Mapping[str, str]) -> float:
            return least_memory(*tractable(self._price(problem.folded, problem.everything, pins).table, Limits()))[0]

        pins = binding_pins(self.request.pins, least_bytes, self.request.limit_bytes) if self.request.pins else ()
        pinned = f"; the pins of {' and '.join(pins)} together leave no plan within it: lift one" if pins else ""
        memory, usable = self.cluster.memory_bytes / 2**30, usable_memory_bytes(self.cluster) / 2**30
        return (
            f"{pinned}, or plan a smaller batch. A device of cluster {self.cluster.name} has {memory:.1f} GiB, of which"
            f" {usable:.1f} GiB are the limit unless memory_limit_bytes (--memory-limit) says otherwise"
        )


def _with_crossing(candidates: Candidates, crossing: Mapping[str, Layout]) -> Candidates:
    """The candidates with the boundary tensors `crossing` in the given layouts only."""
    layouts = {name: (crossing[name],) if name in crossing else offered for name, offered in candidates.layouts.items()}
    outputs = {name: (crossing[name],) if name in crossing else offered for name, offered in candidates.outputs.items()}
    return replace(candidates, layouts=layouts, outputs=outputs)
