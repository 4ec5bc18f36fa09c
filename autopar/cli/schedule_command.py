"""`autopar schedule`: which jobs get which devices of a cluster, under several policies."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from tabulate import tabulate

from autopar.cli.pictures import can_draw, draw_jobs
from autopar.errors import AutoparError
from autopar.jobs.fair_shares import fair_shares, parse_mix
from autopar.jobs.job_report import format_policies, jobs_json
from autopar.jobs.policies import POLICIES
from autopar.jobs.simulate_jobs import Share, simulate_jobs
from autopar.jobs.workload import check_jobs, read_curves, read_jobs
from autopar.units import format_seconds


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `autopar schedule`."""
    parser.add_argument("jobs", metavar="JOBS", nargs="?", help="CSV: job, submitted_s, model, devices, plan, steps")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="devices of the cluster")
    parser.add_argument(
        "--steps",
        action="append",
        required=True,
        metavar="FILE",
        help="CSV: model, devices, plan, step_s, measured or of autopar sweep --csv; may be repeated",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        help="asked: first come, first served; backfill; shortest first; equal shares; gain: change plans and devices"
        " where they gain most, with guarantees (default: all)",
    )
    parser.add_argument(
        "--change",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for which a running job stands still when its devices change (default 60)",
    )
    parser.add_argument(
        "--fit",
        metavar="MODEL:N,...",
        help="instead of JOBS: the devices of so many jobs of these models that start together, e.g. gpt2,llama3-8b:2",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the shares of each job")
    parser.add_argument("--picture", metavar="FILE", help="draw devices in use over time (needs matplotlib)")
    parser.set_defaults(run=_schedule)


def _schedule(options: argparse.Namespace) -> int:
    if not 0 <= options.change < float("inf"):
        raise AutoparError(f"--change {options.change}: expected seconds, 0 or more")
    if options.devices < 1:
        raise AutoparError(f"--devices {options.devices}: expected a positive number")
    if options.picture:
        can_draw("schedule")
    if (options.jobs is None) == (options.fit is None):
        raise AutoparError("schedule: expected JOBS, a file of jobs, or --fit, the models of jobs that start together")
    curves = read_curves(options.steps)
    if options.fit:
        models = parse_mix(options.fit, curves)
        return _tell_shares(models, fair_shares(models, curves, options.devices), as_json=options.json)
    jobs = read_jobs(options.jobs)
    if not jobs:
        raise AutoparError(f"{options.jobs} has no jobs")
    check_jobs(jobs, curves, options.devices)
    logs = {
        name: simulate_jobs(jobs, curves, options.devices, POLICIES[name], change_s=options.change)
        for name in dict.fromkeys(options.policy or POLICIES)
    }
    if options.picture:
        draw_jobs(logs, options.picture)
    print(json.dumps(jobs_json(logs), indent=1) if options.json else format_policies(logs))
    return 0


def _tell_shares(models: Sequence[str], shares: Sequence[Share], *, as_json: bool) -> int:
    rows = [{"model": model, **asdict(share)} for model, share in zip(models, shares)]
    text = [[row["model"], row["devices"], row["plan"], format_seconds(row["step_s"])] for row in rows]
    print(json.dumps(rows, indent=1) if as_json else tabulate(text, ["model", "devices", "plan", "step"]))
    return 0
