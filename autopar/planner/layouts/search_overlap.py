"""The search of a mesh whose plans hide collectives behind compute, so that no table of sums has their time.

A table prices the weighted lengths of paths through forward and backward, which are lower bounds
(`overlap.path_weights`). Its best choice is timed as a plan, whose longest paths join those that the next table weighs,
by the weights that are best for the plans met so far (`overlap.best_shares`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.evaluate import Costs
from autopar.costmodel.overlap.best_shares import best_shares
from autopar.costmodel.overlap.pass_time import Handover, PassCost
from autopar.costmodel.overlap.path_weights import Paths
from autopar.planner.layouts.optimizer_offload import Solution
from autopar.planner.problem import ENOUGH_GAP, Problem, Setting
from autopar.search.table import Choice, cost_of, memory_of

_MOST_ROUNDS = 12
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

    @property
    def passes(self) -> tuple[PassCost, PassCost]:
        """Its forward and its backward."""
        assert self.costs is not None, "timed with overlap"
        return self.costs.passes

    def lengths_s(self, paths: Sequence[Sequence[Handover | None]]) -> list[list[float]]:
        """Seconds along each of the paths through each pass; the rest of the step counts as forward."""
        rest_s = [self.step_s - sum(each.time_s for each in self.passes), 0.0]
        return [[rest + each.length_s(path) for path in own] for rest, each, own in zip(rest_s, self.passes, paths)]


@dataclass(frozen=True)
class Round:
    """One search: its setting, problem and starts."""

    setting: Setting
    problem: Problem
    starts: list[tuple[int, ...]]


def timed(setting: Setting, problem: Problem, strategies: tuple[int, ...]) -> Timed:
    """A choice with its time: the cost in the table or, with overlap, that of its plan."""
    if not setting.has_overlap:
        return Timed(strategies, cost_of(problem.priced.table, strategies))
    costs = setting.costs(problem.decode(strategies))
    return Timed(strategies, costs.step_s, costs)


class MeshRounds:
    """The search of a problem, in rounds of which the caller makes each search and hands its choice to `take`.

    Without overlap there is one round. `starts`: of each round; `known`: those among them, or others, that are timed.
    After the last round: `last`, it, with its `choice`; `best`, the best plan met; `lower_bound_s`, proven.
    """

    def __init__(
        self, setting: Setting, problem: Problem, starts: Sequence[tuple[int, ...]], known: Iterable[Timed] = ()
    ) -> None:
        table, self.overlap = problem.priced.table, setting.cluster.overlap
        self.last = Round(setting, problem, list(starts))
        self.choice: Choice | None = None
        fitting = [one for one in known if memory_of(table, one.strategies) <= table.memory_limit_bytes]
        self.best = min(fitting, key=lambda one: one.step_s, default=None)
        self.lower_bound_s = 0.0
        self._is_stuck = False  # whether the last round gave neither a plan that was not met nor a better bound
        self.met = [one for one in fitting if self.best and one.step_s <= _NEAR * self.best.step_s]
        self.paths = self.around = setting.paths or Paths(self.overlap)

    def rounds(self) -> Iterator[Round]:
        """The rounds, until the bound is as good as weights of the paths met can make it."""
        setting, starts = self.last.setting, self.last.starts
        if not setting.has_overlap:
            yield self.last
            return
        for number in range(_MOST_ROUNDS):
            most_s = float("inf")
            if self.met:
                most_s, target = _best_paths(self.met, self.overlap)
                self.paths = target if self.around.is_trivial else self.around.towards(target, _STEP)
            budget = setting.budget if number == _MOST_ROUNDS - 1 else setting.budget.part(_SHARE)
            own = replace(setting, paths=self.paths, budget=budget)
            best = [] if self.best is None else [self.best.strategies]
            self.last = Round(own, own.repriced(self.last.problem), [*starts, *best])
            yield self.last
            assert self.best is not None, "the choice was taken"
            missing_s = min(self.best.step_s, most_s) - self.lower_bound_s
            is_enough = missing_s <= ENOUGH_GAP * self.best.step_s or self.lower_bound_s >= setting.to_beat_s
            if is_enough or self._is_stuck or setting.budget.is_spent:
                return

    def take(self, choice: Choice) -> None:
        """Take the choice of the last round."""
        self.choice, made = choice, timed(self.last.setting, self.last.problem, choice.strategies)
        is_better = choice.lower_bound_s > self.lower_bound_s + ENOUGH_GAP * made.step_s / 4
        self._is_stuck = not is_better and any(one.strategies == made.strategies for one in self.met)
        if self.best is None or made.step_s <= self.best.step_s:
            self.best = made
        if choice.lower_bound_s >= self.lower_bound_s:
            self.lower_bound_s, self.around = choice.lower_bound_s, self.paths
        self.met.append(made)

    @property
    def solution(self) -> Solution:
        """The best plan."""
        assert self.best is not None, "a round was made"
        return Solution(self.last.problem.decode(self.best.strategies), self.best.step_s, self.lower_bound_s)


def _best_paths(met: Sequence[Timed], overlap: float) -> tuple[float, Paths]:
    """(the best lower bound of the plans `met` that weights of their paths give, these)."""
    paths = [
        tuple(dict.fromkeys([None, *(each.handover for each in passes)])) for passes in zip(*(x.passes for x in met))
    ]
    bound_s, shares = best_shares([one.lengths_s(paths) for one in met])
    return bound_s, Paths(overlap, *(dict(zip(own, share)) for own, share in zip(paths, shares)))
