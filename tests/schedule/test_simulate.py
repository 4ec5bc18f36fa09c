"""The simulated step against a simulation that only knows what waits for what, and against the formulas of the
papers.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from autopar.schedule.orders import NAMES, Schedule, actions, arriving, receiving_kinds
from autopar.schedule.simulate import StageTimes, as_array, generations, ordered, posted_by, simulate, source_of, step_s
from autopar.schedule.timeline import Action
from tests.schedule.test_orders import schedules

ONE = StageTimes(forward_s=1.0, backward_s=1.0, weight_s=1.0)


def drawn(num_stages: int, seed: int, *, sends: bool = True) -> list[StageTimes]:
    draw = random.Random(seed)
    low, high = (0.1, 0.1, 0.1, 0.0, 0.0), (2.0, 2.0, 2.0, 1.0 * sends, 1.0 * sends)
    return [StageTimes(*map(draw.uniform, low, high)) for _ in range(num_stages)]


def taken(schedule: Schedule, own: StageTimes, kind: str, stage: int) -> float:
    """Seconds of an action."""
    if schedule.name == "zero-bubble" and stage == 0 and kind != "F":
        return own.backward_s + own.weight_s if kind == "W" else 0.0
    return {"F": own.forward_s, "B": own.backward_s + own.weight_s, "I": own.backward_s, "W": own.weight_s}[kind]


def played(
    schedule: Schedule, times: list[StageTimes], *, holds_gradients: bool = False
) -> dict[tuple, tuple[float, float]]:
    """Start and end of each action: ranks as little machines that are asked again and again whether they can go on.

    `holds_gradients`: whether a rank waits for the arrival of gradients as the runtime does.
    """
    p, last = schedule.num_ranks, schedule.num_stages - 1
    began: dict[tuple[int, str], float] = {}  # when a rank began what needed a neighbour's last message of a kind
    waiting = [list(row) for row in actions(schedule)]
    lengths = [len(row) for row in waiting]
    clock, done = [0.0] * p, {}
    posted, on_the_way = posted_by(schedule) if holds_gradients else [{}] * p, [{} for _ in range(p)]

    def arrival(kind: str, stage: int, k: int) -> float:
        """When the gradient that `stage` sends is there, whose receive must be posted."""
        needed = [tuple(a) for a in arriving(schedule, (stage - 1) % p, kind)]
        at = needed.index((kind, stage - 1, k))
        assert not at or needed[at - 1] in done, "a rank waits for a receive that is not posted, perhaps for ever"
        posted_s = done[needed[at - 1]][0] if at else 0.0
        return max(done[kind, stage, k][1], posted_s) + (times[stage].send_back_s if p > 1 else 0.0)

    while any(waiting):
        for rank in range(p):
            if not waiting[rank]:
                continue
            kind, stage, k = waiting[rank][0]
            took = taken(schedule, times[stage], kind, stage)
            arrives, travels = 0.0, 0.0
            if kind == "F" and stage > 0:
                sender, travels = ("F", stage - 1, k), times[stage - 1].send_s
            elif kind in "BI" and stage < last:
                sender, travels = (kind, stage + 1, k), times[stage + 1].send_back_s
            else:
                sender = None
            if sender is not None:
                if sender not in done:
                    continue
                arrives, travels = done[sender][1], travels if sender[1] % p != rank else 0.0
            index = lengths[rank] - len(waiting[rank])
            start = max([clock[rank], *(arrival(*sent) for sent in on_the_way[rank].pop(index, []))])
            if sender is not None:  # a receive is posted when the rank begins what needed the one before
                start = max(start, max(arrives, began.get((rank, sender[0]), 0.0)) + travels)
                began[rank, sender[0]] = start
            clock[rank] = start + took
            done[(kind, stage, k)] = (start, clock[rank])
            if kind in "BI" and stage and index in posted[rank]:
                on_the_way[rank].setdefault(posted[rank][index], []).append((kind, stage, k))
            waiting[rank].pop(0)
    return done


@pytest.mark.parametrize("name", NAMES)
def test_unequal_stages_take_what_machines_that_wait_for_one_another_take(name):
    for seed, schedule in enumerate(schedules(name)):
        times = drawn(schedule.num_stages, seed)
        found = {
            tuple(span.action): (span.start_s, span.end_s) for row in simulate(schedule, times).rows for span in row
        }
        expected = played(schedule, times)
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(
            [found[key] for key in expected], list(expected.values()), rtol=1e-12, err_msg=str(schedule)
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "accumulate"])
def test_a_neighbour_sends_in_the_order_in_which_its_receives_are_posted(name):
    for schedule in schedules(name):
        for kind in receiving_kinds(schedule):
            step = 1 if kind == "F" else -1
            for rank in range(schedule.num_ranks):
                needed = arriving(schedule, rank, kind)
                sender = (rank - step) % schedule.num_ranks
                made = [a._replace(stage=a.stage + step) for a in actions(schedule)[sender] if a.kind == kind]
                assert needed == [a for a in made if 0 <= a.stage < schedule.num_stages], (schedule, rank)


def test_hardly_a_step_is_longer_because_gradients_on_their_way_back_are_waited_for():
    """The simulation leaves it out: what is waited for is on its way already."""
    for name in ("1f1b", "gpipe", "interleaved", "zero-bubble"):
        for seed, schedule in enumerate(schedules(name)):
            times = drawn(schedule.num_stages, seed)
            held = played(schedule, times, holds_gradients=True)
            assert max(end for _, end in held.values()) <= 1.02 * simulate(schedule, times).step_s, schedule


def test_gpipe_is_two_flow_shops():
    # n equal jobs through machines in line: the sum of one job's times, and the slowest machine's n - 1 times more
    # (Johnson 1954).
    schedule, times = Schedule("gpipe", 5, 5, 9), drawn(5, 1, sends=False)
    forward, backward = [t.forward_s for t in times], [t.backward_s + t.weight_s for t in times]
    expected = sum(forward) + sum(backward) + 8 * (max(forward) + max(backward))
    assert simulate(schedule, times).step_s == pytest.approx(expected)


@pytest.mark.parametrize("p, m", [(2, 2), (2, 8), (4, 4), (4, 16), (8, 24)])
def test_bubble_of_balanced_stages_is_the_papers(p, m):
    for times in (ONE, StageTimes(1.0, 1.3, 0.9)):
        assert simulate(Schedule("1f1b", p, p, m), [times] * p).bubble == pytest.approx((p - 1) / (m + p - 1))
        assert simulate(Schedule("gpipe", p, p, m), [times] * p).bubble == pytest.approx((p - 1) / (m + p - 1))
        for v in (2, 3):  # the bubble of Narayanan et al. is (p - 1) / v of a microbatch's time on a rank
            found = simulate(Schedule("interleaved", p * v, p, m), [times] * (p * v)).bubble
            assert found == pytest.approx((p - 1) / (v * m + p - 1)), (v, times)


@pytest.mark.parametrize("p, m", [(2, 2), (4, 8), (8, 24)])
def test_bubble_of_zero_bubble_is_that_of_zb_h1(p, m):
    # Qi et al. 2024, table 2: ZB-H1 waits (p - 1)(T_F + T_B - T_W), which is (p - 1) T for three equal parts T.
    found = simulate(Schedule("zero-bubble", p, p, m), [ONE] * p).bubble
    assert found == pytest.approx((p - 1) / (3 * m + p - 1))


def test_many_sets_of_times_at_once_are_each_of_them_alone():
    order = ordered(Schedule("1f1b", 4, 4, 8))
    sets = [drawn(4, seed) for seed in range(6)]
    together = step_s(order, np.stack([as_array(times) for times in sets], axis=-1))
    assert together.tolist() == [simulate(order.schedule, times).step_s for times in sets]


def turns_s(schedule: Schedule, times: Sequence[StageTimes]) -> float:
    """Seconds of a step without sends, from event to event: what runs at a moment shares the cores."""
    rows, done = [list(row) for row in actions(schedule)], set[Action]()
    left: dict[Action, float] = {}
    now = 0.0
    while any(rows):
        for row in rows:
            if row and row[0] not in left and source_of(schedule, row[0]) in {None, *done}:
                kind, stage, _ = row[0]
                left[row[0]] = taken(schedule, times[stage], kind, stage) * times[stage].alone
        slower = max(1.0, sum(times[action.stage].cores for action in left))
        passed = min(left.values())
        now += passed * slower
        for action in [action for action in left if left[action] <= passed]:
            rows[schedule.rank_of(action.stage)].remove(action)
            done.add(action)
            del left[action]
        left = {action: seconds - passed for action, seconds in left.items()}
    return now


@pytest.mark.parametrize("name, num_stages", [("gpipe", 4), ("1f1b", 4), ("interleaved", 8), ("zero-bubble", 4)])
@pytest.mark.parametrize("cores", [0.25, 0.5, 1.0])
def test_ranks_that_share_cores_take_turns(name, num_stages, cores):
    schedule = Schedule(name, num_stages, 4, 8)
    alone = 1 / (4 * cores)  # of a rank whose part is a quarter of the cores while all compute
    times = [replace(one, alone=alone, cores=cores) for one in drawn(num_stages, 3, sends=False)]
    found, work_s = simulate(schedule, times).step_s, [one.forward_s + one.backward_s + one.weight_s for one in times]
    assert found == pytest.approx(turns_s(schedule, times))
    own = simulate(schedule, [replace(one, alone=1.0, cores=0.0) for one in times]).step_s
    assert max(8 * sum(work_s) / 4, alone * own) <= found * (1 + 1e-9) and found <= own * (1 + 1e-9)
    assert cores > 0.25 or found == pytest.approx(own)


def test_a_thousand_sets_take_a_moment():
    order = ordered(Schedule("1f1b", 8, 8, 32))
    times = np.random.default_rng(0).uniform(1, 2, (8, 7, 1000))
    start = time.process_time()
    step_s(order, times)
    assert time.process_time() - start < 0.5


def test_generations_hold_each_action_once_behind_what_it_needs() -> None:
    schedule = Schedule("interleaved", 4, 2, 4)
    found = generations(schedule)
    assert sorted(action for wave in found for action in wave) == sorted(
        action for row in actions(schedule) for action in row
    )
    wave_of = {action: wave for wave, done in enumerate(found) for action in done}
    for kind, stage, microbatch in wave_of:
        if kind == "F" and stage:
            assert wave_of[Action("F", stage - 1, microbatch)] < wave_of[Action("F", stage, microbatch)]
    for row in actions(schedule):
        assert [wave_of[action] for action in row] == sorted({wave_of[action] for action in row})


def test_an_order_that_no_rank_can_begin_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank waits for the other: a simulation that only looked for an action that is ready would never end."""
    rows = (Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))
    monkeypatch.setattr("autopar.schedule.simulate.actions", lambda _: rows)
    with pytest.raises(nx.NetworkXUnfeasible):
        generations(Schedule("gpipe", 2, 2, 1))
