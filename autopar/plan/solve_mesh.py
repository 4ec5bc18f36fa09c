"""The best plan on one mesh: price, search, and where the memory limit makes layers differ, search again with layers apart."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.costmodel.hardware import Cluster
from autopar.ir.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.segment import ends_apart, segmented
from autopar.mesh import Mesh
from autopar.plan.clock import Clock
from autopar.plan.hand import hand_plans
from autopar.plan.setting import ENOUGH_GAP, Problem, Setting, Wishes
from autopar.plan.store import HandCosts
from autopar.sbp.assignment import Assignment
from autopar.search.table import cost_of, memory_of

# The plans that a lower bound is about.
ANY, ALIKE = "plan", "plan whose inner layers are alike"
# A gap above this under a memory limit is worth another search, in which the layers of a repeat may differ.
_WORTH_SEGMENTS = ENOUGH_GAP


@dataclass(frozen=True)
class Solved:
    """The best plan found on `mesh`; `cost_s` is its step. bound_of, hand, found_by: as in `Plan`."""

    mesh: Mesh
    assignment: Assignment
    cost_s: float
    lower_bound_s: float
    bound_of: str
    hand: Mapping[str, HandCosts]
    found_by: str


def solve_mesh(
    graph: Graph, mesh: Mesh, cluster: Cluster, wishes: Wishes, *, starts: Iterable[Assignment] = (), time_limit_s: float, clock: Clock
) -> Solved:
    """The best plan found in the time, never worse than a start or a hand plan that meets the wishes.

    First, last and inner copies of a repeat have choices of their own; where the memory limit leaves a gap, so have parts of the inner
    copies. PinError, InfeasibleError or MeshError if what is wished cannot be.
    """
    setting = Setting(graph, mesh, cluster, wishes, time_limit_s, clock)
    folded = clock.run("fold", lambda: fold_stored(graph, wishes))
    problem = setting.problem(segmented(folded, graph, ends_apart(folded)))
    hand = clock.run("hand plans", lambda: hand_plans(graph, problem.folded, problem.everything, mesh))
    by_hand = {name: found for name, assignment in hand.items() if (found := problem.encode(assignment)) is not None}
    given = [found for start in starts if (found := problem.encode(start)) is not None]
    choice = setting.search(problem, [*given, *by_hand.values()])
    found_by = next((f"hand plan {name}" for name, start in by_hand.items() if start == choice.strategies), "search")
    table = problem.priced.table
    costs = {name: HandCosts(cost_of(table, start), round(memory_of(table, start))) for name, start in by_hand.items()}
    bound_of = ALIKE if folded.repeats else ANY
    best = Solved(mesh, problem.decode(choice), choice.cost_s, choice.lower_bound_s, bound_of, costs, found_by)
    if choice.gap > _WORTH_SEGMENTS and wishes.memory_limit_bytes < float("inf") and setting.remaining_s > 0:
        return _with_layers_apart(setting, setting.problem(segmented(folded, graph, _halves(folded))), best)
    return best


def _with_layers_apart(setting: Setting, problem: Problem, best: Solved) -> Solved:
    """`best`, or better where the copies of a repeat may be of several kinds."""
    start = problem.encode(best.assignment)
    choice = setting.search(problem, [] if start is None else [start])
    if choice.cost_s >= best.cost_s:
        return replace(best, lower_bound_s=min(best.lower_bound_s, choice.lower_bound_s))
    return replace(best, assignment=problem.decode(choice), cost_s=choice.cost_s, lower_bound_s=choice.lower_bound_s, found_by="search")


def fold_stored(graph: Graph, wishes: Wishes) -> Folded:
    """The graph folded so that what is stored differently already stays apart."""
    return fold(graph, {item.value.name: wishes.stored[item.fqn] for item in graph.inputs if item.fqn in wishes.stored})


def _halves(folded: Folded) -> tuple[tuple[int, ...], ...]:
    """Segments of each repeat: the first copy, then half of the rest, half of what is left, ...: any number of copies is a sum of some."""
    return tuple((1, *_halved(repeat.count - 1)) for repeat in folded.repeats)


def _halved(count: int) -> Iterator[int]:
    """
    >>> list(_halved(11))
    [6, 3, 1, 1]
    """
    while count > 0:
        half = (count + 1) // 2
        yield half
        count -= half
