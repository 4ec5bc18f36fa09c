"""The search of a mesh whose plans hide reductions behind backward, so that no table of sums has their time.

A table prices the weighted lengths of paths through backward, which are lower bounds (`overlap.path_weights`). Its best
choice is timed as a plan, whose longest path joins those that the next table weighs: fictitious play of planner and
path (Brown 1951), in which the average of the paths met tends to the weights of the best bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.overlap.lanes import Handover
from autopar.costmodel.overlap.path_weights import Paths
from autopar.planner.problem import ENOUGH_GAP, Problem, Setting
from autopar.search.table import Choice, cost_of, memory_of

_MOST_ROUNDS = 4
# The share of the time left for a round that is not the last.
_SHARE = 0.5


@dataclass(frozen=True)
class Timed:
    """A choice of a problem, with the time of its plan and the path that takes this time."""

    strategies: tuple[int, ...]
    step_s: float
    handover: Handover | None = None


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
    return Timed(strategies, costs.step_s, costs.handover)


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
    table = problem.priced.table
    fitting = [one for one in known if memory_of(table, one.strategies) <= table.memory_limit_bytes]
    best, bound_s = min(fitting, key=lambda one: one.step_s, default=None), 0.0
    paths = setting.paths or Paths(setting.cluster.overlap, (best.handover,) if best else ())
    for number in range(_MOST_ROUNDS):
        is_last = number == _MOST_ROUNDS - 1
        own = setting.budget if is_last else setting.budget.part(_SHARE)
        of_round = replace(setting, paths=paths, budget=own)
        problem = of_round.repriced(problem)
        choice = of_round.search(problem, [*starts, *([best.strategies] if best else [])], is_brief=is_brief)
        made = timed(setting, problem, choice.strategies)
        best = made if best is None or made.step_s < best.step_s else best
        bound_s = max(bound_s, choice.lower_bound_s)
        is_enough = best.step_s - bound_s <= ENOUGH_GAP * best.step_s or bound_s >= setting.to_beat_s
        if is_enough or setting.budget.is_spent:
            break
        paths = replace(paths, met=(*paths.met, made.handover))
    assert best is not None, "each round has a choice"
    return Searched(replace(setting, paths=of_round.paths), problem, choice, best, bound_s)
