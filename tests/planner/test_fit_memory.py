"""Plans whose predicted peak is not what the search estimated: by hand on made-up plans, and through the planner with
made-up peaks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from autopar.errors import InfeasibleError
from autopar.mesh import parse_mesh
from autopar.planner.budget import Budget
from autopar.planner.choose import choose_plan
from autopar.planner.fit_memory import Fit, LimitedSearch, Predict
from autopar.planner.request import PlanRequest
from tests.planner.cases import CPU, traced

LIMIT = 1000.0


@dataclass(frozen=True)
class Made:
    """A plan: the less memory it takes, the slower it is."""

    memory_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...] = ()
    memory_limit_bytes: float = 0.0
    graph = SimpleNamespace(ops=())  # few, so that the peak is soon predicted

    @property
    def rank_limits_bytes(self) -> tuple[float, ...]:
        return (self.memory_limit_bytes,) * len(self.memory_bytes)

    @property
    def step_s(self) -> float:
        return 1e6 / max(self.memory_bytes)


def make(allowed_bytes: float) -> Made:
    """The fastest within the limit, which less than 500 bytes are for none."""
    if allowed_bytes < 500:
        raise InfeasibleError("500 bytes are the least")
    return Made((int(allowed_bytes), int(allowed_bytes) // 2))


def missed_by(factor: float) -> Callable[[Made], tuple[int, ...]]:
    return lambda plan: tuple(round(factor * size) for size in plan.memory_bytes)


def fitting(make: Callable[[float], Made], limit: float, predict: Predict) -> Made:
    """The plan of `make` that fits, as the planner looks for one."""
    first = make(limit)
    fit = Fit[Made](limit, predict, Budget.of(), waiting=[LimitedSearch([limit] * len(first.memory_bytes), first)])
    for search in fit.searches():
        try:
            fit.waiting.append(replace(search, plan=make(min(search.allowed_bytes))))
        except InfeasibleError as error:
            fit.reasons.append(str(error))
    if fit.best is None:
        raise fit.refusal("so would others")
    return fit.best


@pytest.mark.parametrize("factor", [0.7, 1.0])
def test_a_plan_that_fits_is_taken_as_it_is(factor: float):
    found = fitting(make, LIMIT, missed_by(factor))
    assert found.memory_bytes[0] == LIMIT and found.peak_bytes[0] == factor * LIMIT


@pytest.mark.parametrize("factor", [1.01, 1.1, 1.45, 1.9])
def test_the_limit_is_lowered_by_what_was_missed(factor: float):
    found = fitting(make, LIMIT, missed_by(factor))
    assert 0.98 * LIMIT < found.peak_bytes[0] <= LIMIT and found.memory_limit_bytes == LIMIT


def test_only_ranks_above_the_limit_lower_it():
    found = fitting(make, LIMIT, lambda plan: (round(1.1 * plan.memory_bytes[0]), round(1.6 * plan.memory_bytes[1])))
    assert found.peak_bytes[0] > 0.98 * LIMIT


def test_the_next_best_is_taken_where_the_best_does_not_fit():
    heavy, light = Made((1000,)), Made((800,))
    peaks = {1000: (1100,), 800: (900,)}
    found = Fit[Made](
        LIMIT,
        lambda plan: peaks[plan.memory_bytes[0]],
        Budget.of(),
        waiting=[LimitedSearch([LIMIT], one) for one in (light, heavy)],
    )
    assert [search.number for search in found.searches()] == [1] and found.best.memory_bytes == light.memory_bytes
    again = Made((900,))  # faster than the light one, and fits
    fit = Fit[Made](
        LIMIT,
        lambda plan: peaks.get(plan.memory_bytes[0], (950,)),
        Budget.of(),
        waiting=[LimitedSearch([LIMIT], one) for one in (light, heavy)],
    )
    for search in fit.searches():
        fit.waiting.append(replace(search, plan=again))
    assert fit.best.memory_bytes == again.memory_bytes


def test_a_search_left_as_too_slow_is_made_again_only_if_what_is_faster_does_not_fit():
    fast, slow, unsearched = Made((1000,)), Made((500,)), LimitedSearch([LIMIT], source="left", at_least_s=1250.0)
    fit = Fit[Made](LIMIT, lambda plan: (900,), Budget.of(), waiting=[LimitedSearch([LIMIT], fast)])
    fit.add(unsearched, None, 1250.0)
    assert not list(fit.searches()) and fit.best.memory_bytes == fast.memory_bytes

    fit = Fit[Made](LIMIT, lambda plan: (1100 if plan.memory_bytes[0] == 1000 else 900,), Budget.of())
    for one in (fast, slow):
        fit.add(LimitedSearch([LIMIT], source=one), one)
    fit.add(unsearched, None, 1250.0)
    asked = []
    for search in fit.searches():
        asked.append((search.source, fit.to_beat_s))
        if search.source == "left":
            fit.add(search, Made((800,)) if len(asked) == 2 else None)
    assert asked == [(fast, slow.step_s), ("left", slow.step_s)] and fit.best.memory_bytes == (800,)


def test_a_search_that_finds_nothing_faster_again_does_not_come_before_the_plan_it_could_not_beat():
    fit = Fit[Made](LIMIT, lambda plan: (900,), Budget.of())
    fit.add(LimitedSearch([LIMIT], source="left"), None, 1100.0)
    fit.add(LimitedSearch([LIMIT]), Made((800,)))
    asked = 0
    for search in fit.searches():
        asked += 1
        fit.add(search, None, fit.to_beat_s)
    assert asked == 1 and fit.best.memory_bytes == (800,)


def test_what_no_lower_limit_makes_fit_is_refused():
    with pytest.raises(
        InfeasibleError, match=r"in 1000 bytes .* a predicted peak of 2500 bytes .*; 500 bytes are the least"
    ):
        fitting(make, LIMIT, missed_by(2.5))
    with pytest.raises(InfeasibleError, match=r"^500 bytes are the least"):
        fitting(make, 400.0, missed_by(1.0))
    with pytest.raises(InfeasibleError, match="a predicted peak of 1001 bytes"):
        fitting(make, LIMIT, lambda _: (1001, 500))


@pytest.mark.parametrize("limit", [10 * LIMIT, float("inf")])
def test_every_plan_is_asked_also_where_memory_is_plenty(limit: float):
    assert fitting(lambda _: Made((590,)), limit, missed_by(3.0)).peak_bytes == (1770,)


def test_what_is_estimated_far_below_the_limit_may_be_above_it():
    found = fitting(make, 2 * LIMIT, lambda plan: tuple(3 * size for size in plan.memory_bytes))
    assert found.memory_bytes[0] < 0.4 * 2 * LIMIT and 0.95 * 2 * LIMIT < found.peak_bytes[0] <= 2 * LIMIT


@pytest.mark.parametrize(("name", "mesh"), [("vgg13", "dp=2,tp=2"), ("gpt2", "pp=2,dp=2")])
def test_the_planner_keeps_to_the_peak(name: str, mesh: str):
    graph, mesh = traced(name), parse_mesh(mesh)
    limit = 0.8 * max(
        choose_plan(graph, mesh, CPU, PlanRequest(memory_limit_bytes=float("inf"), time_limit_s=2.0)).memory_bytes
    )

    def planned(factor: float):
        return choose_plan(
            graph, mesh, CPU, PlanRequest(memory_limit_bytes=limit, time_limit_s=6.0), predict=missed_by(factor)
        )

    believed, above = planned(1.0), planned(1.15)
    assert max(believed.peak_bytes) <= limit and max(above.peak_bytes) <= limit
    assert max(above.memory_bytes) <= limit / 1.15 and above.memory_limit_bytes == limit
    assert type(above).loads(above.dumps(), graph, mesh).peak_bytes == above.peak_bytes
    assert "program" in above.explain()
    with pytest.raises(InfeasibleError, match=r"predicted peak|fits"):
        planned(50.0)


def test_a_hand_plan_whose_peak_fits_is_taken_although_its_estimate_does_not():
    """The plans of a mixture of experts that fit by the estimate took three times as long as one by hand, which fits
    by its peak.
    """
    graph, mesh = traced("gpt2"), parse_mesh("dp=2,tp=2")
    hand = choose_plan(graph, mesh, CPU, PlanRequest(time_limit_s=1e-3, num_microbatches=1)).hand
    request = PlanRequest(memory_limit_bytes=0.97 * hand["ddp"].memory_bytes, time_limit_s=1e-3, num_microbatches=1)
    heavy = choose_plan(graph, mesh, CPU, request, predict=missed_by(1.0))
    light = choose_plan(graph, mesh, CPU, request, predict=missed_by(0.9))
    assert heavy.step_s > light.step_s == pytest.approx(hand["ddp"].step_s) and "ddp" in light.found_by
    assert max(light.peak_bytes) <= request.limit_bytes < max(light.memory_bytes)
    assert light.lower_bound_s <= light.step_s and light.memory_limit_bytes == request.limit_bytes
