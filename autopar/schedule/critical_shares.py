"""`critical_shares`: lower bounds of a schedule's time for all cuts of a model into its stages."""

from collections.abc import Iterable
from dataclasses import dataclass

from ortools.linear_solver import pywraplp

from autopar.schedule.orders import Schedule, actions
from autopar.schedule.simulate import posters, source_of
from autopar.schedule.timeline import Action


@dataclass(frozen=True, slots=True)
class MicrobatchWork:
    """Seconds of one microbatch on all stages together: of weight gradients, and of all else.

    `send_s`, `send_back_s`: p2p of the values and of the gradients at any cut between two stages, at least.
    `slowest_s`: of the stages of one rank or another, at least.
    """

    weight_s: float
    other_s: float
    send_s: float = 0.0
    send_back_s: float = 0.0
    slowest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CriticalShares:
    """A lower bound of a step: `seconds`, and so many times the weight gradients and all else of a microbatch."""

    weight: float
    other: float
    seconds: float

    def bound_s(self, weight_s: float, other_s: float) -> float:
        """Seconds of a step with so many for a microbatch on all stages together."""
        return self.seconds + self.weight * weight_s + self.other * other_s

    def over(self, other: "CriticalShares") -> float:
        """The largest multiple of the weights of `other` that these are not below."""
        pairs = (self.weight, other.weight), (self.other, other.other)
        return min((mine / its for mine, its in pairs if its > 0), default=1.0)


def critical_shares(schedule: Schedule, work: MicrobatchWork) -> tuple[CriticalShares, ...]:
    """Lower bounds, of which at least one holds for each cut of a model into the stages of `schedule`, with any times
    of the stages that have at least the sends and the slowest rank of `work`. They are the best for its sums.

    The actions are the events of a graph, and the least time over all cuts is a linear program: each action ends at
    least the time of its stage behind those that it waits for. By duality, the prices of the sums are the weights of
    critical paths, which bound the time for other sums too. Which rank is the slowest is tried for each, where that is
    slower than the mean.
    """
    solver, sums, rank_s = _program(schedule, work)
    scale = work.weight_s + work.other_s
    found = []
    least = min(work.slowest_s / scale, 1.0) if work.slowest_s * schedule.num_ranks > scale else 0.0
    for slowest in rank_s if least else rank_s[:1]:
        slowest.SetLb(least)
        status = solver.Solve()
        assert status == pywraplp.Solver.OPTIMAL, f"some cut takes least, found status {status}"
        prices = [one.dual_value() for one in sums]
        known_s = prices[0] * work.weight_s + prices[-1] * work.other_s
        found.append(CriticalShares(prices[0], prices[-1], solver.Objective().Value() * scale - known_s))
        slowest.SetLb(0.0)
    return tuple(found)


def _program(schedule: Schedule, work: MicrobatchWork) -> tuple[pywraplp.Solver, list, list]:
    """(the linear program in parts of the whole work, its sums of work, the constraint on each rank's time)."""
    rows, receives = actions(schedule), posters(schedule)
    is_split = any(action.kind == "W" for row in rows for action in row)
    scale = work.weight_s + work.other_s
    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    ahead, back, weight = ([solver.NumVar(0.0, infinity, "") for _ in range(schedule.num_stages)] for _ in range(3))
    end = {action: solver.NumVar(0.0, infinity, "") for row in rows for action in row}
    last = solver.NumVar(0.0, infinity, "")

    def parts(action: Action) -> list[pywraplp.Variable]:
        """The times that an action takes; the first stage of a backward in two parts does all of it in the second."""
        kind, stage, _ = action
        if kind == "F":
            return [ahead[stage]]
        if kind == "B" or (kind == "W" and not stage):
            return [back[stage], weight[stage]]
        return [] if not stage else [back[stage] if kind == "I" else weight[stage]]

    def follows(action: Action, before: Action | None, wait_s: float, *, is_behind_start: bool = False) -> None:
        row = solver.Constraint(wait_s / scale, infinity)
        row.SetCoefficient(end[action], 1.0)
        taken = dict.fromkeys(parts(action), -1.0)
        if before is not None:
            row.SetCoefficient(end[before], -1.0)
            for one in parts(before) if is_behind_start else ():
                taken[one] = taken.get(one, 0.0) + 1.0
        for one, number in taken.items():
            row.SetCoefficient(one, number)

    for row in rows:
        for before, action in zip((None, *row), row):
            follows(action, before, 0.0)
            source = source_of(schedule, action)
            if source is None:
                continue
            is_sent = schedule.rank_of(source.stage) != schedule.rank_of(action.stage)
            sent_s = (work.send_s if action.kind == "F" else work.send_back_s) if is_sent else 0.0
            follows(action, source, sent_s)
            if sent_s and action in receives:
                follows(action, receives[action], sent_s, is_behind_start=True)
        solver.Add(last >= end[row[-1]])
    whole = [ahead, back, weight]
    sums = [(weight, work.weight_s), (ahead + back, work.other_s)] if is_split else [(ahead + back + weight, scale)]
    totals = [_sum(solver, each, total / scale, total / scale) for each, total in sums]
    ranks = map(schedule.stages_of, range(schedule.num_ranks))
    rank_s = [_sum(solver, [one[stage] for one in whole for stage in stages], 0.0, infinity) for stages in ranks]
    solver.Minimize(last)
    return solver, totals, rank_s


def _sum(
    solver: pywraplp.Solver, variables: Iterable[pywraplp.Variable], least: float, most: float
) -> pywraplp.Constraint:
    row = solver.Constraint(least, most)
    for variable in variables:
        row.SetCoefficient(variable, 1.0)
    return row
