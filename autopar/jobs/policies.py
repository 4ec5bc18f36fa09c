"""Policies: which job gets which devices."""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from autopar.jobs.simulate_jobs import ClusterState, Policy, RunningJob, Share
from autopar.jobs.workload import Job

# A running job is given more devices only if that saves this many times what the change costs.
_WORTH = 2.0


def as_asked(state: ClusterState) -> dict[str, Share]:
    """First come, first served: each job with the devices and the plan that it asks for, and none before its turn."""
    shares, free = {}, state.num_free
    for job in state.waiting:
        if job.devices > free:
            break
        shares[job.name] = state.asked(job)
        free -= job.devices
    return shares


def shortest_first(state: ClusterState) -> dict[str, Share]:
    """Whichever fits of the waiting jobs, the shortest first, each with what it asks for."""
    return _filled(state, sorted(state.waiting, key=lambda job: job.steps * state.asked(job).step_s))


def backfilled(state: ClusterState) -> dict[str, Share]:
    """Whichever fits of the waiting jobs, the first come first, each with what it asks for."""
    return _filled(state, list(state.waiting))


def _filled(state: ClusterState, jobs: list[Job]) -> dict[str, Share]:
    shares, free = {}, state.num_free
    for job in jobs:
        if job.devices <= free:
            shares[job.name] = state.asked(job)
            free -= job.devices
    return shares


def equal_share(state: ClusterState) -> dict[str, Share]:
    """As many devices for each job, running and waiting, and the best plan for them.

    Devices that a job's curve does not need go to the others; a job that cannot run on its share waits.
    """
    jobs = sorted([*(each.job for each in state.running), *state.waiting], key=lambda job: (job.submitted_s, job.name))
    shares, free = dict[str, Share](), state.num_devices
    while jobs:
        needed = [job for job in jobs if state.curves[job.model].sizes[0] <= free // len(jobs)]
        if len(needed) == len(jobs):
            break
        jobs = [job for job in jobs if job in needed] or jobs[:-1]  # the last come wait
    for number, job in enumerate(jobs):
        each = free // (len(jobs) - number)
        useful = [size for size in state.curves[job.model].sizes if size <= each]
        shares[job.name] = state.best(job, useful[-1])
        free -= useful[-1]
    kept = {each.job.name: each.share for each in state.running}
    stopped = {name: Share(0, math.inf, "waits") for name in kept if name not in shares}
    return shares | stopped


def by_gain(state: ClusterState) -> dict[str, Share]:
    """Devices where they gain most, with guarantees.

    No job runs slower than with what its owner asked for, and none takes longer from its start to its end, whatever
    changes cost. A job that waits starts as soon as the fewest devices that guarantee its speed are free, or can be
    taken from jobs that run faster than asked: that with the least work first. What is left goes, one step of a curve
    after the other, where the speed as a share of the asked one grows most for each device.
    """
    shares = {each.job.name: each.share for each in state.running}
    jobs = {each.job.name: each for each in state.running}
    free, new = state.num_free, dict[str, Job]()
    for job in sorted(state.waiting, key=lambda job: _work(state, job)):
        needed = _fewest(state, job)
        taken = dict(_reclaimed(state, jobs, shares, needed - free)) if needed > free else {}
        free += sum(shares[name].devices - share.devices for name, share in taken.items())
        shares |= taken
        if needed <= free:
            shares[job.name], new[job.name] = state.best(job, needed), job
            free -= needed
    while (grown := _best_growth(state, jobs, new, shares, free)) is not None:
        name, share = grown
        free -= share.devices - shares[name].devices
        shares[name] = share
    return shares


def _work(state: ClusterState, job: Job) -> float:
    """Device-seconds that a job takes at the asked speed."""
    fewest = _fewest(state, job)
    return job.steps * state.best(job, fewest).step_s * fewest


def _fewest(state: ClusterState, job: Job) -> int:
    """The fewest devices on which the best plan is as fast as what the owner asked for."""
    curve, asked_s = state.curves[job.model], state.asked(job).step_s
    return next(size for size in curve.sizes if curve.step_s(size) <= asked_s)


def _allows(state: ClusterState, each: RunningJob, share: Share) -> bool:
    """Whether the job may change to the share: as fast as asked, and over no later than as asked."""
    asked_s = state.asked(each.job).step_s
    ends_s = max(state.now_s, each.resumes_s) + state.change_s + each.remaining * share.step_s
    return share.step_s <= asked_s and ends_s <= each.started_s + each.job.steps * asked_s


def _reclaimed(
    state: ClusterState, jobs: Mapping[str, RunningJob], shares: Mapping[str, Share], needed: int
) -> Iterator[tuple[str, Share]]:
    """Smaller shares of running jobs that free `needed` devices, least loss of speed for a device first; none if not
    so many can be freed.
    """
    losses = []
    for name, each in jobs.items():
        if shares[name] != each.share:
            continue  # it was cut for another job already
        sizes = [size for size in state.curves[each.job.model].sizes if size < each.share.devices]
        allowed = [share for size in sizes if _allows(state, each, share := state.best(each.job, size))]
        if allowed:
            least = allowed[0]
            loss = (least.step_s / each.share.step_s - 1) / (each.share.devices - least.devices)
            losses.append((loss, name, allowed))
    found, freed = dict[str, Share](), 0
    for _, name, allowed in sorted(losses, key=lambda row: row[:2]):
        if freed >= needed:
            break
        enough = [share for share in allowed if shares[name].devices - share.devices >= needed - freed]
        found[name] = enough[-1] if enough else allowed[0]
        freed += shares[name].devices - found[name].devices
    if freed >= needed:
        yield from found.items()


def _best_growth(
    state: ClusterState, jobs: Mapping[str, RunningJob], new: Mapping[str, Job], shares: Mapping[str, Share], free: int
) -> tuple[str, Share] | None:
    best, most = None, 0.0
    for name, share in shares.items():
        each = jobs.get(name)
        job = each.job if each else new[name]
        if each and share != each.share and share.devices < each.share.devices:
            continue  # it was cut for another job
        asked_s = state.asked(job).step_s
        for size in state.curves[job.model].sizes:
            if not share.devices < size <= share.devices + free:
                continue
            other = state.best(job, size)
            gain = (asked_s / other.step_s - asked_s / share.step_s) / (size - share.devices)
            if gain > most and (each is None or _is_worth(state, each, other)):
                best, most = (name, other), gain
    return best


def _is_worth(state: ClusterState, each: RunningJob, share: Share) -> bool:
    saved_s = each.remaining * (each.share.step_s - share.step_s)
    return saved_s > _WORTH * state.change_s and _allows(state, each, share)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"asked": as_asked, "backfill": backfilled, "shortest": shortest_first, "equal": equal_share, "gain": by_gain}
)
