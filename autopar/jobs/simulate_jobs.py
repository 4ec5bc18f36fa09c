"""`simulate_jobs`: the jobs of a cluster over time, under a policy that decides at each arrival and each end."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.jobs.workload import Job, SpeedCurve


@dataclass(frozen=True, slots=True)
class Share:
    """The devices of a job and the step that it takes on them."""

    devices: int
    step_s: float
    plan: str


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that has started.

    `remaining`: steps left. `resumes_s`: until then it is saved, moved and loaded after a change. `started_s`: of its
    first step.
    """

    job: Job
    share: Share
    remaining: float
    resumes_s: float
    started_s: float

    @property
    def ends_s(self) -> float:
        """The time of its last step if nothing changes."""
        return self.resumes_s + self.remaining * self.share.step_s

    def at(self, now_s: float) -> "RunningJob":
        """The job at a later time, before its end."""
        if now_s <= self.resumes_s:
            return self
        done = (now_s - self.resumes_s) / self.share.step_s
        return replace(self, remaining=max(0.0, self.remaining - done), resumes_s=now_s)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The facts that a policy decides by: the time, the jobs that wait (by time) and those that run, and the speeds.

    `change_s`: seconds for which a running job stands still when its share changes.
    """

    now_s: float
    waiting: tuple[Job, ...]
    running: tuple[RunningJob, ...]
    curves: Mapping[str, SpeedCurve]
    num_devices: int
    change_s: float

    @property
    def num_free(self) -> int:
        """Devices without a job."""
        return self.num_devices - sum(each.share.devices for each in self.running)

    def asked(self, job: Job) -> Share:
        """The share that its owner asks for."""
        return Share(job.devices, self.curves[job.model].asked_s(job), job.plan)

    def best(self, job: Job, devices: int) -> Share:
        """The share of so many devices under the best plan for them."""
        curve = self.curves[job.model]
        return Share(devices, curve.step_s(devices), curve.plan_of(devices))


# The shares from now on, by the name of the job; a running job that has none keeps its share.
Policy = Callable[[ClusterState], Mapping[str, Share]]


@dataclass(frozen=True, slots=True)
class Interval:
    """A time in which a job has the same share."""

    job: str
    start_s: float
    end_s: float
    share: Share


@dataclass(frozen=True)
class JobLog:
    """The outcome of all jobs: their times, and every share."""

    jobs: tuple[Job, ...]
    num_devices: int
    started_s: Mapping[str, float]
    ended_s: Mapping[str, float]
    intervals: tuple[Interval, ...] = field(repr=False)

    @property
    def completion_s(self) -> dict[str, float]:
        """Job -> seconds from when it was submitted to its end."""
        return {job.name: self.ended_s[job.name] - job.submitted_s for job in self.jobs}

    @property
    def makespan_s(self) -> float:
        """Seconds from the first job's submission to the last one's end."""
        return max(self.ended_s.values(), default=0.0) - min((job.submitted_s for job in self.jobs), default=0.0)

    @property
    def utilisation(self) -> float:
        """Devices with a job, as a share of all, over the makespan."""
        used = sum((each.end_s - each.start_s) * each.share.devices for each in self.intervals)
        return used / (self.num_devices * self.makespan_s) if self.makespan_s else 0.0


def simulate_jobs(
    jobs: Iterable[Job], curves: Mapping[str, SpeedCurve], num_devices: int, policy: Policy, *, change_s: float
) -> JobLog:
    """The log of the jobs under `policy`; a start costs nothing more than its steps, a change `change_s`.

    Devices are alike, and a job has those that it is given wherever they are: the curve is that of dense placement.
    """
    arriving = sorted(jobs, key=lambda job: (job.submitted_s, job.name))
    everything, at = tuple(arriving), 0
    waiting, running = list[Job](), dict[str, RunningJob]()
    started, ended, since, intervals = dict[str, float](), dict[str, float](), dict[str, float](), list[Interval]()

    def close(name: str, now_s: float) -> None:
        if now_s > since[name]:
            intervals.append(Interval(name, since[name], now_s, running[name].share))
        since[name] = now_s

    while at < len(arriving) or running or waiting:
        next_s = arriving[at].submitted_s if at < len(arriving) else math.inf
        now_s = min(next_s, min((each.ends_s for each in running.values()), default=math.inf))
        assert now_s < math.inf, "the policy leaves jobs without devices though all are free"
        for name in [name for name, each in running.items() if each.ends_s <= now_s]:
            close(name, now_s)
            ended[name] = now_s
            del running[name]
        while at < len(arriving) and arriving[at].submitted_s <= now_s:
            waiting.append(arriving[at])
            at += 1
        running = {name: each.at(now_s) for name, each in running.items()}
        state = ClusterState(now_s, tuple(waiting), tuple(running.values()), curves, num_devices, change_s)
        by_name = {job.name: job for job in waiting}
        for name, share in policy(state).items():
            if name in by_name:
                job = by_name[name]
                running[name] = RunningJob(job, share, job.steps, now_s, now_s)
                started[name] = since[name] = now_s
                waiting.remove(job)
            elif share != running[name].share:
                close(name, now_s)
                running[name] = replace(running[name], share=share, resumes_s=now_s + change_s)
        assert sum(each.share.devices for each in running.values()) <= num_devices, "devices were given twice"
    return JobLog(everything, num_devices, started, ended, tuple(intervals))
