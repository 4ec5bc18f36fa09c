"""The lower bounds of schedules against the simulation of drawn stages, and against the formulas of the papers."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedule.critical_shares import MicrobatchWork, critical_shares
from autopar.schedule.orders import NAMES, Schedule
from autopar.schedule.simulate import StageTimes, simulate
from tests.schedule.test_orders import schedules
from tests.schedule.test_simulate import drawn

SMALL = [one for name in NAMES for one in schedules(name) if one.num_stages * one.num_microbatches <= 100]
LEAST = ("send_s", "send_back_s", "slowest_s")


def work_of(schedule: Schedule, times: list[StageTimes]) -> MicrobatchWork:
    """The sums of the stages, with the least sends and the slowest rank."""
    stage_s = [one.forward_s + one.backward_s + one.weight_s for one in times]
    return MicrobatchWork(
        sum(one.weight_s for one in times),
        sum(one.forward_s + one.backward_s for one in times),
        min((one.send_s for one in times[:-1]), default=0.0),
        min((one.send_back_s for one in times[1:]), default=0.0),
        max(sum(stage_s[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks)),
    )


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SMALL), st.integers(0, 10**6))
def test_no_cut_takes_less(schedule: Schedule, seed: int) -> None:
    draw, times = Random(seed), drawn(schedule.num_stages, seed)
    step_s, work = simulate(schedule, times).step_s, work_of(schedule, times)
    # as the caller knows them: the shares are those of other sums, of the sends and the slowest stage less is known
    guess = MicrobatchWork(*(draw.uniform(0.5, 2.0) * total for total in (work.weight_s, work.other_s)))
    least = {
        name: draw.choice((0.0, 0.5, 1.0)) * getattr(work, name) for name in ("send_s", "send_back_s", "slowest_s")
    }
    for known in (work, replace(guess, **least)):
        bounds = [one.bound_s(work.weight_s, work.other_s) for one in critical_shares(schedule, known)]
        assert min(bounds) <= step_s * (1 + 1e-7), known


@pytest.mark.parametrize(("num_ranks", "num"), [(2, 8), (4, 16), (8, 32)])
def test_1f1b_and_gpipe_of_many_microbatches_have_the_bubble_of_the_papers(num_ranks: int, num: int) -> None:
    for name in ("1f1b", "gpipe"):
        (found,) = critical_shares(Schedule(name, num_ranks, num_ranks, num), MicrobatchWork(1.0, 2.0))
        assert (found.weight, found.other) == pytest.approx(((num + num_ranks - 1) / num_ranks,) * 2), name
        assert found.seconds == pytest.approx(0.0, abs=1e-9)


def test_sends_and_a_slow_stage_take_longer() -> None:
    schedule, even = Schedule("zero-bubble", 4, 4, 8), MicrobatchWork(1.0, 2.0)

    def least_s(work: MicrobatchWork) -> float:
        return min(one.bound_s(1.0, 2.0) for one in critical_shares(schedule, work))

    # of the first microbatch to the last stage and back, and all others of the slowest stage
    assert least_s(replace(even, send_s=0.1, send_back_s=0.1)) > least_s(even) + 0.15
    assert least_s(replace(even, slowest_s=1.0)) >= 8 * 1.0 > least_s(even)
    assert len(critical_shares(schedule, replace(even, slowest_s=1.0))) == 4
    equal = [StageTimes(0.25, 0.25, 0.25)] * 4
    assert least_s(even) == pytest.approx(simulate(schedule, equal).step_s, rel=0.02)
