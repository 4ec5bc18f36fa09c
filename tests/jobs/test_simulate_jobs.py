"""The event simulation beside one that steps through time, and the guarantees of the policies."""

import math
import random

import pytest

from autopar.jobs.policies import POLICIES, by_gain
from autopar.jobs.simulate_jobs import ClusterState, RunningJob, simulate_jobs
from autopar.jobs.workload import Job, SpeedCurve

DEVICES = 16


def drawn(seed: int, num_jobs: int = 12) -> tuple[list[Job], dict[str, SpeedCurve]]:
    rng = random.Random(seed)
    curves = {}
    for model in "abc":
        rows, step_s = {}, rng.uniform(1, 20)
        least = rng.choice([1, 1, 2])
        for size in (1, 2, 3, 4, 8, 12, 16):
            if size >= least:
                for plan in ("ddp", "zero"):
                    rows[size, plan] = step_s * size ** -rng.uniform(0.3, 1.0)
        curves[model] = SpeedCurve(model, rows)
    jobs = []
    for number in range(num_jobs):
        model = rng.choice("abc")
        size, plan = rng.choice(list(curves[model].rows))
        steps = rng.randint(1, 300)
        jobs.append(Job(f"j{number}", rng.choice([0.0, 5.0, 50.0, rng.uniform(0, 500)]), model, size, plan, steps))
    return jobs, curves


def stepped(jobs, curves, num_devices, policy, change_s):
    """The ends of all jobs, by asking at every moment in order what happens next, each moment computed from the start:
    a job is the list of its shares, and what it has done by a time is the integral over these.
    """
    history: dict[str, list[tuple[float, float, object]]] = {}  # name -> (from, resumes, share)
    waiting, ended, now = [], {}, -math.inf
    todo = {job.name: job for job in jobs}

    def done(name, until):
        rows, total = history[name], 0.0
        for number, (start, resumes, share) in enumerate(rows):
            stop = rows[number + 1][0] if number + 1 < len(rows) else until
            total += max(0.0, min(stop, until) - max(start, resumes)) / share.step_s
        return total

    def end(name):
        start, resumes, share = history[name][-1]
        left = todo[name].steps - done(name, start)
        return max(start, resumes) + left * share.step_s if share.step_s < math.inf else math.inf

    while len(ended) < len(jobs):
        arrivals = [job.submitted_s for job in jobs if job.submitted_s > now]
        now = min([*arrivals, *(end(name) for name in history if name not in ended)])
        for name in list(history):
            if name not in ended and end(name) <= now:
                ended[name] = now
        seen = {*history, *(job.name for job in waiting)}
        waiting += sorted(
            (job for job in jobs if job.submitted_s <= now and job.name not in seen),
            key=lambda job: (job.submitted_s, job.name),
        )
        running = tuple(
            RunningJob(todo[name], rows[-1][2], todo[name].steps - done(name, now), max(now, rows[-1][1]), rows[0][0])
            for name, rows in history.items()
            if name not in ended
        )
        shares = policy(ClusterState(now, tuple(waiting), running, curves, num_devices, change_s))
        for name, share in shares.items():
            if name in history:
                if share != history[name][-1][2]:
                    history[name].append((now, now + change_s, share))
            else:
                history[name] = [(now, now, share)]
        waiting = [job for job in waiting if job.name not in history]
    return ended


@pytest.mark.parametrize("policy", POLICIES)
def test_two_simulators_agree_on_every_end(policy):
    for seed in range(40):  # of 5 policies: 200 workloads
        jobs, curves = drawn(seed)
        log = simulate_jobs(jobs, curves, DEVICES, POLICIES[policy], change_s=3.0)
        ended = stepped(jobs, curves, DEVICES, POLICIES[policy], 3.0)
        assert log.ended_s == pytest.approx(ended, rel=1e-9), f"seed {seed}"
        assert log.utilisation <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_no_guarantee_is_broken(seed):
    jobs, curves = drawn(seed, 25)
    log = simulate_jobs(jobs, curves, DEVICES, by_gain, change_s=4.0)
    for job in jobs:
        asked_s = curves[job.model].asked_s(job)
        own = [each for each in log.intervals if each.job == job.name]
        assert all(each.share.step_s <= asked_s for each in own)
        assert log.ended_s[job.name] - log.started_s[job.name] <= job.steps * asked_s * (1 + 1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_devices_are_given_once(policy):
    jobs, curves = drawn(7, 40)
    log = simulate_jobs(jobs, curves, DEVICES, POLICIES[policy], change_s=1.0)
    moments = sorted({each.start_s for each in log.intervals})
    for now in moments:
        assert sum(each.share.devices for each in log.intervals if each.start_s <= now < each.end_s) <= DEVICES
    assert log.ended_s.keys() == {job.name for job in jobs}


def test_as_asked_is_first_come_first_served_by_hand():
    curves = {"m": SpeedCurve("m", {(1, "ddp"): 10.0, (2, "ddp"): 5.0})}
    jobs = [Job("a", 0, "m", 2, "ddp", 10), Job("b", 1, "m", 2, "ddp", 10), Job("c", 2, "m", 1, "ddp", 1)]
    log = simulate_jobs(jobs, curves, 3, POLICIES["asked"], change_s=0.0)
    assert log.ended_s == pytest.approx({"a": 50.0, "b": 100.0, "c": 60.0})  # c waits behind b, which waits for a
    assert log.completion_s == pytest.approx({"a": 50.0, "b": 99.0, "c": 58.0})
    assert log.makespan_s == pytest.approx(100.0)
    assert log.utilisation == pytest.approx((2 * 50 + 2 * 50 + 10) / 300)  # device-seconds of a, b and c
    filled = simulate_jobs(jobs, curves, 3, POLICIES["backfill"], change_s=0.0)
    assert filled.ended_s["c"] == pytest.approx(12.0)


def test_gain_starts_what_waits_by_taking_what_is_more_than_asked():
    curves = {"m": SpeedCurve("m", {(1, "ddp"): 10.0, (2, "ddp"): 5.0, (4, "ddp"): 3.0})}
    jobs = [Job("a", 0, "m", 1, "ddp", 100), Job("b", 30, "m", 2, "ddp", 10)]
    log = simulate_jobs(jobs, curves, 4, by_gain, change_s=2.0)
    assert log.started_s["b"] == 30.0
    assert [(each.share.devices, each.start_s) for each in log.intervals if each.job == "a"][:2] == [
        (4, 0.0),
        (2, 30.0),
    ]
