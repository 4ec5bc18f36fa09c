"""The search of a mesh whose plans hide reductions behind backward, so that no table of sums has their time.

A table prices the weighted lengths of paths through backward, which are lower bounds (`overlap.path_weights`). Its best
choice is timed as a plan, whose longest path joins those that the next table weighs, by the weights that are best for
the plans met so far (`overlap.best_shares`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.evaluate import Costs
from autopar.costmodel.overlap.best_shares import best_shares
from autopar.costmodel.overlap.lanes import Handover, backward_time, path_length
from autopar.costmodel.overlap.path_weights import Paths
from autopar.planner.problem import ENOUGH_GAP, Problem, Setting
from autopar.search.table import Choice, cost_of, memory_of

_MOST_ROUNDS = 5
# The share of the time left for a round that is not the last.
_SHARE = 0.5
# The step from the weights of the best bound so far towards those that are best for the plans met, which alone jump
# from one end to the other.
_STEP = 0.5
# Known plans that take longer than so many times the fastest say little of the paths of the best.
_NEAR = 1.2


@dataclass(frozen=True)
class Timed:
    """A choice of a problem, with the time of its plan and, with overlap, its costs."""

    strategies: tuple[int, ...]
    step_s: float
    costs: Costs | None = None

    def length_s(self, overlap: float, handover: Handover | None) -> float:
        """Seconds of the step along a path through backward."""
        assert self.costs is not None, "timed with overlap"
        rest_s = self.step_s - backward_time(self.costs.backward, overlap)[0]
        return rest_s + path_length(self.costs.backward, overlap, handover)


@dataclass(frozen=True)
class Searched:
    """The best plan met, a proven lower bound, and the last search: its setting, problem and choice."""

    setting: Setting
    problem: Problem
    choice: Choice
    best: Timed
    lower_bound_s: float


def timed(setting: Setting, problem: Problem, strategies: tuple[int, ...]) -> Timed:
    """A choice with its time: the cost in the table or, with overlap, that of its plan."""
    if not setting.has_overlap:
        return Timed(strategies, cost_of(problem.priced.table, strategies))
    costs = setting.costs(problem.decode(strategies))
    return Timed(strategies, costs.step_s, costs)


def searched(
    setting: Setting,
    problem: Problem,
    starts: Sequence[tuple[int, ...]],
    *,
    known: Sequence[Timed] = (),
    is_brief: bool = False,
) -> Searched:
    """The search of `problem` from `starts`; `known`: those among them, or others, that are timed.

    `is_brief`: as in `solve`. InfeasibleError as of `Setting.search`.
    """
    if not setting.has_overlap:
        choice = setting.search(problem, list(starts), is_brief=is_brief)
        return Searched(setting, problem, choice, Timed(choice.strategies, choice.cost_s), choice.lower_bound_s)
    table, overlap = problem.priced.table, setting.cluster.overlap
    met = [one for one in known if memory_of(table, one.strategies) <= table.memory_limit_bytes]
    best, bound_s = min(met, key=lambda one: one.step_s, default=None), 0.0
    met = [one for one in met if best and one.step_s <= _NEAR * best.step_s]
    paths = around = Paths(overlap)
    for number in range(_MOST_ROUNDS):
        is_last, most_s = number == _MOST_ROUNDS - 1, float("inf")
        if met:
            most_s, target = _best_paths(met, overlap)
            paths = target if around.is_trivial else around.towards(target, _STEP)
        own = setting.budget if is_last else setting.budget.part(_SHARE)
        of_round = replace(setting, paths=paths, budget=own)
        problem = of_round.repriced(problem)
        choice = of_round.search(problem, [*starts, *([best.strategies] if best else [])])
        made = timed(setting, problem, choice.strategies)
        best = made if best is None or made.step_s < best.step_s else best
        if choice.lower_bound_s >= bound_s:
            bound_s, around = choice.lower_bound_s, paths
        enough_s = ENOUGH_GAP * best.step_s
        if min(best.step_s, most_s) - bound_s <= enough_s or bound_s >= setting.to_beat_s or setting.budget.is_spent:
            break
        met.append(made)
    assert best is not None, "each round has a choice"
    return Searched(of_round, problem, choice, best, bound_s)


def _best_paths(met: Sequence[Timed], overlap: float) -> tuple[float, Paths]:
    """(the best lower bound of the plans `met` that weights of their paths give, these)."""
    paths = tuple(dict.fromkeys([None, *(one.costs.handover for one in met if one.costs is not None)]))
    bound_s, shares = best_shares([[one.length_s(overlap, path) for path in paths] for one in met])
    return bound_s, Paths(overlap, tuple(zip(paths, shares)))
