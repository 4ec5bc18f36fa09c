"""`solve_mesh`: the best plan on one mesh, by pricing and searching; again with groups of layers if memory binds."""

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.work_bound import floor_s
from autopar.errors import InfeasibleError
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.planner.layouts.optimizer_offload import Solution, host_search, is_worth_moving
from autopar.planner.layouts.search_overlap import MeshRounds, Timed, timed
from autopar.planner.layouts.two_groups import can_mix, mixture, two_groups
from autopar.planner.problem import ENOUGH_GAP, Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.plans.serialise import HandCosts
from autopar.sbp.assignment import NO_CHOICES, Assignment
from autopar.search.table import Choice, memory_of

# Above the memory limit by the estimate up to this multiple, a plan may have a peak within it: the estimate counts all
# gradients beside all activations.
_NEARLY = 1.1
# The plans for which a lower bound is proven.
ANY, ALIKE, GROUPS = (
    "plan",
    "plan whose inner layers are alike",
    "plan whose inner layers are alike within each of these groups",
)


@dataclass(frozen=True)
class Solved:
    """The best plan found on `mesh`; `cost_s`: of its step. `bound_of`, `hand`, `found_by`: as in `Plan`.

    `hand_plans`: those that satisfy the request, where the cluster's prices have an error within which plans tie.
    `nearly`: hand plans that take less, whose estimate is above the memory limit by so little that their peak may be
    within it; fastest first.
    """

    mesh: Mesh
    assignment: Assignment
    cost_s: float
    lower_bound_s: float
    bound_of: str
    hand: Mapping[str, HandCosts]
    found_by: str
    hand_plans: tuple["Solved", ...] = ()
    nearly: tuple["Solved", ...] = ()

    def or_faster(self, other: Solution, **changes: Any) -> "Solved":
        """The faster of this plan and `other`, of the same search with these `changes`."""
        if other.step_s >= self.cost_s:
            return self
        return replace(
            self,
            assignment=other.assignment,
            cost_s=other.step_s,
            lower_bound_s=other.lower_bound_s,
            found_by=other.found_by,
            **changes,
        )


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
    if no plan satisfies the request; Interrupted at Ctrl-C before the search, if the caller has another way to plan.
    """
    setting = Setting(graph, mesh, cluster, request, budget, to_beat_s=to_beat_s)
    with budget.left_at_interrupt() if budget.has_other else nullcontext():
        with budget.timed("fold"):
            folded = fold_stored(graph, request)
        problem = setting.problem(segmented(folded, graph, ends_apart(folded)))
        if (slow := setting.too_slow(problem)) is not None:
            return _as_chosen(setting, folded, problem, slow)
        with budget.timed("hand plans"):
            hand = hand_plans(graph, problem.folded, problem.everything, mesh)
        by_hand = {name: one for name, own in hand.items() if (one := problem.encode(own)) is not None}
        lifted = [strategies for start in starts if (strategies := problem.encode(start)) is not None]
        known = [*lifted, *by_hand.values()]
    times = {name: timed(setting, problem, start) for name, start in by_hand.items()}
    best, alike = _unsolved(setting, folded, problem, times), problem
    is_mixed = can_mix(ends_apart(folded)) and request.limit_bytes < float("inf")
    search = MeshRounds(setting, problem, known, times.values())
    try:
        for at in search.rounds():
            search.take(at.setting.search(at.problem, at.starts, is_brief=is_mixed and not setting.has_overlap))
    except InfeasibleError:
        on_host = None if budget.is_spent else host_search(setting, problem)
        if on_host is None:
            raise
        return best.or_faster(on_host.solved(on_host.setting.search(on_host.problem, known)))
    setting, problem, choice = search.last.setting, search.last.problem, search.choice
    assert choice is not None, "each search has a choice"
    best = best.or_faster(_named(search, by_hand))
    if is_worth_moving(problem.priced.table, choice, cluster) and not budget.is_spent:
        on_host = host_search(replace(setting, to_beat_s=min(to_beat_s, best.cost_s)), problem)
        if on_host is not None:
            best = best.or_faster(on_host.solved(on_host.setting.search(on_host.problem, known)))
    can_win = choice.gap > ENOUGH_GAP and choice.lower_bound_s < min(to_beat_s, best.cost_s)
    if is_mixed and choice.around is not None and can_win and not budget.is_spent:
        groups, mixed = _in_groups(setting, folded, problem, choice, best.assignment)
        search = MeshRounds(setting, groups, mixed)
        for at in search.rounds():
            search.take(at.setting.search(at.problem, at.starts))
        bound_s = min(best.lower_bound_s, search.solution.lower_bound_s)
        best = replace(best, lower_bound_s=bound_s).or_faster(search.solution, bound_of=GROUPS)
    return replace(best, nearly=_nearly(setting, alike, times, best))


def _as_chosen(setting: Setting, folded: Folded, problem: Problem, choice: Choice) -> Solved:
    """The plan of a choice, without those by hand."""
    known = {"cost_s": choice.cost_s, "lower_bound_s": choice.lower_bound_s}
    return replace(_unsolved(setting, folded, problem, {}), assignment=problem.decode(choice.strategies), **known)


def _in_groups(
    setting: Setting, folded: Folded, alike: Problem, choice: Choice, best: Assignment
) -> tuple[Problem, list[tuple[int, ...]]]:
    """The problem with two groups of interior copies, and starts of its search, with `best` among them."""
    assert choice.around is not None, "the limit binds"
    over_bytes, within_bytes = (memory_of(alike.priced.table, end) for end in choice.around)
    limit = setting.request.limit_bytes
    segments, share = ends_apart(folded), (limit - within_bytes) / (over_bytes - within_bytes)
    problem = setting.problem(segmented(folded, setting.graph, two_groups(segments, share)))
    above, within = (alike.decode(end) for end in choice.around)
    known = (mixture(setting.graph, folded, segments, share, above, within), best, above, within)
    return problem, [start for assignment in known if (start := problem.encode(assignment)) is not None]


def _named(search: MeshRounds, by_hand: Mapping[str, tuple[int, ...]]) -> Solution:
    """The plan that was searched, with the name of the hand plan that it is; `by_hand`: name -> its choice."""
    best = search.best and search.best.strategies
    found_by = next((f"hand plan {name}" for name, start in by_hand.items() if start == best), "search")
    return replace(search.solution, found_by=found_by)


def _unsolved(setting: Setting, folded: Folded, problem: Problem, by_hand: Mapping[str, Timed]) -> Solved:
    """The mesh before the search, with the costs of the hand plans."""
    table, mesh = problem.priced.table, setting.mesh
    costs = {name: HandCosts(one.step_s, round(memory_of(table, one.strategies))) for name, one in by_hand.items()}
    best = Solved(mesh, NO_CHOICES, math.inf, 0.0, ALIKE if folded.repeats else ANY, costs, "search")
    if setting.cluster.calibration is None:
        return best
    plans = (
        replace(best, assignment=problem.decode(one.strategies), cost_s=one.step_s, found_by=f"hand plan {name}")
        for name, one in by_hand.items()
        if memory_of(table, one.strategies) <= setting.request.limit_bytes
    )
    return replace(best, hand_plans=tuple(plans))


def _nearly(setting: Setting, problem: Problem, by_hand: Mapping[str, Timed], best: Solved) -> tuple[Solved, ...]:
    """`Solved.nearly` of the plan `best`; of each, the lower bound is that of the work alone."""
    table, limit_bytes = problem.priced.table, setting.request.limit_bytes
    above = [
        (one.step_s, name)
        for name, one in by_hand.items()
        if limit_bytes < memory_of(table, one.strategies) <= _NEARLY * limit_bytes and one.step_s < best.cost_s
    ]
    if not above:
        return ()
    least_s = floor_s(setting.graph, setting.mesh, setting.cluster, training=setting.request.training)
    return tuple(
        replace(
            best,
            assignment=problem.decode(by_hand[name].strategies),
            cost_s=step_s,
            lower_bound_s=min(least_s, step_s),
            bound_of=ANY,
            found_by=f"hand plan {name}",
        )
        for step_s, name in sorted(above)
    )


def fold_stored(graph: Graph, request: PlanRequest) -> Folded:
    """The fold of the graph in which inputs with different stored layouts are of different classes."""
    return fold(
        graph, {item.value.name: request.stored[item.fqn] for item in graph.inputs if item.fqn in request.stored}
    )
