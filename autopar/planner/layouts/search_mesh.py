"""`solve_mesh`: the best plan on one mesh, by pricing and searching; again with groups of layers if memory binds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.costmodel.cluster.hardware import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.planner.layouts.optimizer_offload import is_worth_moving, search_on_host
from autopar.planner.layouts.two_groups import can_mix, mixture, two_groups
from autopar.planner.problem import ENOUGH_GAP, Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.plans.serialise import HandCosts
from autopar.sbp.assignment import Assignment
from autopar.search.table import Choice, cost_of, memory_of

# The plans for which a lower bound is proven.
ANY, ALIKE, GROUPS = (
    "plan",
    "plan whose inner layers are alike",
    "plan whose inner layers are alike within each of these groups",
)


@dataclass(frozen=True)
class Solved:
    """The best plan found on `mesh`; `cost_s`: of its step. `bound_of`, `hand`, `found_by`: as in `Plan`."""

    mesh: Mesh
    assignment: Assignment
    cost_s: float
    lower_bound_s: float
    bound_of: str
    hand: Mapping[str, HandCosts]
    found_by: str


def solve_mesh(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    request: PlanRequest,
    *,
    starts: Iterable[Assignment] = (),
    to_beat_s: float = float("inf"),
    budget: Budget,
) -> Solved:
    """The best plan within the budget, never worse than a start or a hand plan that satisfies the request.

    The search ends early if no plan can take less than `to_beat_s`. First, last and interior copies of a repeat are
    planned apart; if the memory limit binds, so are two groups of the interior copies. Optimizer state is offloaded if
    nothing fits otherwise, or if that costs less than other ways to save memory. PinError, InfeasibleError or MeshError
    if no plan satisfies the request.
    """
    setting = Setting(graph, mesh, cluster, request, budget, to_beat_s=to_beat_s)
    folded = budget.run("fold", lambda: fold_stored(graph, request))
    problem = setting.problem(segmented(folded, graph, ends_apart(folded)))
    hand = budget.run("hand plans", lambda: hand_plans(graph, problem.folded, problem.everything, mesh))
    by_hand = {name: found for name, assignment in hand.items() if (found := problem.encode(assignment)) is not None}
    given = [found for start in starts if (found := problem.encode(start)) is not None]
    is_mixed = can_mix(folded) and request.limit_bytes < float("inf")
    known, table = [*given, *by_hand.values()], problem.priced.table
    costs = {name: HandCosts(cost_of(table, start), round(memory_of(table, start))) for name, start in by_hand.items()}
    bound_of = ALIKE if folded.repeats else ANY
    try:
        choice = setting.search(problem, known, is_brief=is_mixed)
    except InfeasibleError:
        found = None if budget.is_spent else search_on_host(setting, problem, known)
        if found is None:
            raise
        return Solved(mesh, found.assignment, found.step_s, found.lower_bound_s, bound_of, costs, "search")
    found_by = next((f"hand plan {name}" for name, start in by_hand.items() if start == choice.strategies), "search")
    best = Solved(
        mesh, problem.decode(choice.strategies), choice.cost_s, choice.lower_bound_s, bound_of, costs, found_by
    )
    if is_worth_moving(table, choice, cluster) and not budget.is_spent:
        best = _or_on_host(setting, problem, known, best)
    can_win = choice.gap > ENOUGH_GAP and choice.lower_bound_s < min(to_beat_s, best.cost_s)
    if is_mixed and choice.around is not None and can_win and not budget.is_spent:
        return _in_groups(setting, folded, problem, choice, best)
    return best


def _or_on_host(setting: Setting, problem: Problem, starts: list[tuple[int, ...]], best: Solved) -> Solved:
    """The faster of `best` and the best plan with optimizer state on the host."""
    found = search_on_host(replace(setting, to_beat_s=min(setting.to_beat_s, best.cost_s)), problem, starts)
    if found is None or found.step_s >= best.cost_s:
        return best
    return replace(
        best, assignment=found.assignment, cost_s=found.step_s, lower_bound_s=found.lower_bound_s, found_by="search"
    )


def _in_groups(setting: Setting, folded: Folded, alike: Problem, choice: Choice, best: Solved) -> Solved:
    """The better of `best` and the best plan with two groups of interior copies."""
    assert choice.around is not None, "the limit binds"
    over_bytes, within_bytes = (memory_of(alike.priced.table, end) for end in choice.around)
    limit = setting.request.limit_bytes
    segments = two_groups(folded, (limit - within_bytes) / (over_bytes - within_bytes))
    problem = setting.problem(segmented(folded, setting.graph, segments))
    above, within = (alike.decode(end) for end in choice.around)
    known = (mixture(setting.graph, folded, segments, above, within), best.assignment, above, within)
    starts = [start for assignment in known if (start := problem.encode(assignment)) is not None]
    found = setting.search(problem, starts)
    if found.cost_s >= best.cost_s:
        return replace(best, lower_bound_s=min(best.lower_bound_s, found.lower_bound_s))
    return replace(
        best,
        assignment=problem.decode(found.strategies),
        cost_s=found.cost_s,
        lower_bound_s=found.lower_bound_s,
        bound_of=GROUPS,
        found_by="search",
    )


def fold_stored(graph: Graph, request: PlanRequest) -> Folded:
    """The fold of the graph in which inputs with different stored layouts are of different classes."""
    return fold(
        graph, {item.value.name: request.stored[item.fqn] for item in graph.inputs if item.fqn in request.stored}
    )
