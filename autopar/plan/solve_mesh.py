"""The best plan on one mesh: price, search, and where the memory limit makes layers differ, search again with layers apart."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic

from autopar.costmodel.decode import decode, encode
from autopar.costmodel.hardware import Cluster
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.price import Priced, price
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.segment import ends_apart, segmented
from autopar.mesh import Mesh
from autopar.plan.clock import Clock
from autopar.plan.conflict import binding_pins
from autopar.plan.hand import hand_plans
from autopar.plan.store import HandCosts
from autopar.sbp.annotate import annotate
from autopar.sbp.assignment import Assignment
from autopar.sbp.pins import restrict
from autopar.sbp.signature import Candidates
from autopar.search.eliminate import Limits
from autopar.search.lagrange import least_memory
from autopar.search.relax import tractable
from autopar.search.solve import solve
from autopar.search.table import Choice, cost_of, memory_of

# A gap above this under a memory limit is worth another search, in which the layers of a repeat may differ.
_WORTH_SEGMENTS = 5e-4


@dataclass(frozen=True)
class Wishes:
    """What is asked of a plan. pins: FQN -> layout, each for all repeats; stored: the same, each for itself."""

    pins: Mapping[str, str]
    stored: Mapping[str, str]
    memory_limit_bytes: float
    optimizer: str


@dataclass(frozen=True)
class Solved:
    """The best plan found on `mesh`; `cost_s` is its step. hand, found_by: as in `Plan`."""

    mesh: Mesh
    folded: Folded
    candidates: Candidates
    assignment: Assignment
    cost_s: float
    lower_bound_s: float
    hand: Mapping[str, HandCosts]
    found_by: str


@dataclass(frozen=True)
class _Problem:
    """What the search is given, and what it stands for."""

    graph: Graph
    folded: Folded
    everything: Candidates
    priced: Priced

    def encode(self, assignment: Assignment) -> tuple[int, ...] | None:
        """The assignment as a choice of the table; None if a pin forbids it."""
        try:
            return encode(self.priced, self.graph, self.folded, assignment)
        except PlanError:
            return None

    def decode(self, choice: Choice) -> Assignment:
        return decode(self.priced, self.graph, self.folded, choice.strategies)


@dataclass(frozen=True)
class _Setting:
    """What the search of one mesh is about."""

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    wishes: Wishes
    deadline: float  # of time.monotonic
    clock: Clock

    def problem(self, folded: Folded) -> _Problem:
        """The search problem with one choice for each class of `folded`."""
        everything = self.clock.run("annotate", lambda: annotate(self.graph, self.mesh, folded))
        return _Problem(self.graph, folded, everything, self.clock.run("price", lambda: self._price(folded, everything, self.wishes.pins)))

    def _price(self, folded: Folded, everything: Candidates, pins: Mapping[str, str]) -> Priced:
        candidates = restrict(everything, self.graph, {**pins, **self.wishes.stored}, self.mesh, folded)
        limit, optimizer = self.wishes.memory_limit_bytes, self.wishes.optimizer
        return price(self.graph, folded, candidates, self.mesh, self.cluster, optimizer=optimizer, memory_limit_bytes=limit)

    def search(self, problem: _Problem, starts: list[tuple[int, ...]]) -> Choice:
        """The cheapest choice; InfeasibleError with what binds and what to do."""
        remaining_s = max(0.0, self.deadline - monotonic())
        work = partial(solve, problem.priced.table, starts=starts, time_limit_s=remaining_s, progress=self.clock.tell_cost)
        try:
            return self.clock.run("search", work)
        except InfeasibleError as error:
            raise InfeasibleError(f"{error}{self._remedy(problem)}") from error

    def _remedy(self, problem: _Problem) -> str:
        def least_bytes(pins: Mapping[str, str]) -> float:
            return least_memory(*tractable(self._price(problem.folded, problem.everything, pins).table, Limits()))[0]

        pins = binding_pins(self.wishes.pins, least_bytes, self.wishes.memory_limit_bytes)
        pinned = f"; the pins of {' and '.join(pins)} together leave no plan within it: lift one" if pins else ""
        memory, usable = self.cluster.memory_bytes / 2**30, usable_memory_bytes(self.cluster) / 2**30
        return (
            f"{pinned}, or plan a smaller batch. A device of cluster {self.cluster.name} has {memory:.1f} GiB, of which {usable:.1f} GiB "
            "are the limit unless memory_limit_bytes (--memory-limit) says otherwise"
        )


def solve_mesh(
    graph: Graph, mesh: Mesh, cluster: Cluster, wishes: Wishes, *, starts: Iterable[Assignment] = (), time_limit_s: float, clock: Clock
) -> Solved:
    """The best plan found in the time, never worse than a start or a hand plan that meets the wishes.

    First, last and inner copies of a repeat have choices of their own; where the memory limit leaves a gap, so have parts of the inner
    copies. PinError, InfeasibleError or MeshError if what is wished cannot be.
    """
    setting = _Setting(graph, mesh, cluster, wishes, monotonic() + time_limit_s, clock)
    folded = clock.run("fold", lambda: fold(graph, _labels(graph, wishes.stored)))
    problem = setting.problem(segmented(folded, graph, ends_apart(folded)))
    hand = clock.run("hand plans", lambda: hand_plans(graph, problem.folded, problem.everything, mesh))
    by_hand = {name: found for name, assignment in hand.items() if (found := problem.encode(assignment)) is not None}
    given = [found for start in starts if (found := problem.encode(start)) is not None]
    choice = setting.search(problem, [*given, *by_hand.values()])
    found_by = next((f"hand plan {name}" for name, start in by_hand.items() if start == choice.strategies), "search")
    table = problem.priced.table
    costs = {name: HandCosts(cost_of(table, start), round(memory_of(table, start))) for name, start in by_hand.items()}
    if choice.gap > _WORTH_SEGMENTS and wishes.memory_limit_bytes < float("inf") and monotonic() < setting.deadline:
        finer = setting.problem(segmented(folded, graph, _halves(folded)))
        same = finer.encode(problem.decode(choice))
        found = setting.search(finer, [] if same is None else [same])
        if found.cost_s < choice.cost_s:
            problem, choice, found_by = finer, found, "search"
    return Solved(mesh, problem.folded, problem.everything, problem.decode(choice), choice.cost_s, choice.lower_bound_s, costs, found_by)


def _labels(graph: Graph, stored: Mapping[str, str]) -> dict[str, str]:
    return {item.value.name: stored[item.fqn] for item in graph.inputs if item.fqn in stored}


def _halves(folded: Folded) -> tuple[tuple[int, ...], ...]:
    """Segments of each repeat: the first copy, half of the rest, half of what is left, and so on: any number of copies is a sum of some.

    >>> _halves(Folded({}, (Repeat(("op",), 12),)))
    ((1, 6, 3, 1, 1),)
    """
    found = []
    for repeat in folded.repeats:
        sizes, rest = [1], repeat.count - 1
        while rest > 0:
            sizes.append((rest + 1) // 2)
            rest -= sizes[-1]
        found.append(tuple(sizes))
    return tuple(found)
