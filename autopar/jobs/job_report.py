"""The jobs under each policy, as text and as data."""

import math
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from autopar.jobs.simulate_jobs import JobLog


def figures(log: JobLog) -> dict[str, float]:
    """The figures of a policy: hours, and the share of devices in use."""
    times = sorted(log.completion_s.values())
    changes = len(log.intervals) - len(log.jobs)
    return {
        "mean completion, h": sum(times) / len(times) / 3600 if times else math.nan,
        "p99 completion, h": times[math.ceil(0.99 * len(times)) - 1] / 3600 if times else math.nan,
        "makespan, h": log.makespan_s / 3600,
        "devices in use": log.utilisation,
        "changes of running jobs": changes,
    }


def format_policies(logs: Mapping[str, JobLog]) -> str:
    """A table of the policies, each beside the first."""
    rows, first = [], figures(next(iter(logs.values())))
    for name, log in logs.items():
        own = figures(log)
        ratios = [f"{first[key] / own[key]:.2f}" if own[key] else "" for key in list(own)[:3]]
        mean, tail, makespan, used, changes = own.values()
        cells = [f"{mean:.2f}", ratios[0], f"{tail:.2f}", ratios[1], f"{makespan:.2f}", ratios[2]]
        rows.append([name, *cells, f"{used:.0%}", int(changes)])
    headers = ["policy", "mean completion, h", "times", "p99, h", "times", "makespan, h", "times", "in use", "changes"]
    return tabulate(rows, headers, disable_numparse=True)


def jobs_json(logs: Mapping[str, JobLog]) -> dict[str, Any]:
    """Policy -> its figures, and for each job when it started and ended and its shares."""
    return {
        name: {
            "figures": figures(log),
            "jobs": [
                {
                    "job": job.name,
                    "submitted_s": job.submitted_s,
                    "started_s": log.started_s[job.name],
                    "ended_s": log.ended_s[job.name],
                    "shares": [
                        {"from_s": each.start_s, "devices": each.share.devices, "plan": each.share.plan}
                        for each in log.intervals
                        if each.job == job.name
                    ],
                }
                for job in log.jobs
            ],
        }
        for name, log in logs.items()
    }
