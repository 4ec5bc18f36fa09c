"""405 jobs on 64 devices, under every policy of `autopar schedule`.

    python -m bench.jobs [--predict]

The jobs are those of Rubick's base workload (MLSys 2025, AlibabaPAI/reconfigurable-dl-scheduler). The steps of GPT-2
and T5 are those that its authors measured on this cluster, in the densest placement that they have of each plan; those
of the other models are predicted as `bench.fidelity` predicts that cluster's rows, with its fit. `--predict` makes the
file of steps (bench/results/job_steps.csv) anew, in half an hour.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence

from autopar.cli.pictures import draw_jobs
from autopar.costmodel.cluster.presets import PRESETS
from autopar.jobs.job_report import figures
from autopar.jobs.policies import POLICIES
from autopar.jobs.simulate_jobs import JobLog, simulate_jobs
from autopar.jobs.workload import check_jobs, read_curves, read_jobs
from bench.fidelity.peak_bytes import peak_bytes
from bench.fidelity.published_models import A800_MODELS
from bench.fidelity.published_rows import DATA, a800_rows
from bench.fidelity.scores import fitted
from bench.fidelity.sources import SOURCES
from bench.fidelity.written_plans import step_s
from bench.report import RESULTS, Row, Table, add

DEVICES, PER_NODE = 64, 8
# Seconds for which a job stands still when its plan or its devices change: given, not measured.
CHANGES_S = (0.0, 60.0, 120.0)
STEPS = RESULTS / "job_steps.csv"
_COLUMNS = ("model", "devices", "plan", "step_s", "origin")
_SMALL, _LARGE = ("bert", "roberta", "vit"), ("llama7", "llama30")
_MEASURED = ("gpt2", "t5")


def _plan(row: dict[str, str]) -> str:
    return f"pp={row['pp']} tp={row['tp']} dp={row['dp']}" if row["kind"] == "3d" else row["kind"]


def _measured() -> Iterator[Row]:
    """Of each plan the step in the densest placement."""
    best: dict[tuple[str, int, str], tuple[int, float]] = {}
    with (DATA / "rubick_a800.csv").open() as text:
        for row in csv.DictReader(text):
            nodes = row["devices_of_each_node"].count("+") + 1
            key = row["model"], int(row["devices"]), _plan(row)
            best[key] = min(best.get(key, (nodes, float("inf"))), (nodes, float(row["step_s"])))
    for (model, devices, plan), (_, seconds) in best.items():
        yield dict(zip(_COLUMNS, (model, devices, plan, seconds, "measured")))


def _shapes(model: str) -> Iterator[tuple[str, int, int, int]]:
    """(kind, pp, tp, dp) of the plans that are priced: data parallelism for small models, all three for large ones."""
    batch, layers = A800_MODELS[model].batch, A800_MODELS[model].layers
    powers = [2**n for n in range(7)]
    for data in powers:
        if batch % data == 0:
            yield from ((kind, 1, 1, data) for kind in ("ddp", "zero") if model in _SMALL and data <= 32)
            yield from (("zero-offload", 1, 1, data) for _ in range(model == "llama7"))
    if model in _LARGE:
        for stages in (1, 2, 3, 4, 5, 6, 8):
            for tensor in (2, 4, 8):
                for data in (1, 2, 4, 8):
                    devices = stages * tensor * data
                    if layers % stages == 0 and batch % data == 0 and 4 <= devices <= DEVICES:
                        yield "3d", stages, tensor, data


def _dense(devices: int) -> str:
    nodes = -(-devices // PER_NODE)
    sizes = [PER_NODE] * (devices // PER_NODE) + [devices % PER_NODE] * (devices % PER_NODE > 0)
    return "+".join(map(str, sizes if devices % nodes else [devices // nodes] * nodes))


def _predicted() -> Iterator[Row]:
    source = next(source for source in SOURCES if "A800" in source.title)
    known = [row for row in source.rows if row.is_fitted]
    numbers = fitted(
        lambda numbers: [step_s(row.written, row.cluster(numbers), row.library) for row in known],
        [row.measured_s for row in known],
        source.start,
    )
    for model in (*_SMALL, *_LARGE):
        for kind, stages, tensor, data in _shapes(model):
            devices = stages * tensor * data
            cells = {"model": model, "kind": kind, "pp": stages, "tp": tensor, "dp": data, "step_s": 1}
            text = {key: str(cell) for key, cell in cells.items()} | {"devices_of_each_node": _dense(devices)}
            (row,) = a800_rows([text])
            cluster = row.cluster(numbers)
            seconds = step_s(row.written, cluster, row.library)
            is_large = model in _LARGE and kind == "3d"
            if is_large and peak_bytes(row.written, cluster, row.library) > PRESETS["a100"].memory_bytes:
                continue
            print(f"{model} {_plan(text)} on {devices}: {seconds:.3f} s", file=sys.stderr, flush=True)
            yield dict(zip(_COLUMNS, (model, devices, _plan(text), seconds, "predicted")))


def predict() -> None:
    """Write the file of steps."""
    rows = [*_measured(), *_predicted()]
    with STEPS.open("w") as text:
        writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _name(change_s: float, policy: str) -> str:
    return f"change {change_s:g} s, {policy}"


def _cells(row: Row) -> Iterable[tuple[str, ...]]:
    own, asked = row["figures"], row["asked"]
    cells = [row["row"]]
    for key in ("mean completion, h", "p99 completion, h", "makespan, h"):
        cells += [f"{own[key]:.2f}", f"{asked[key] / own[key]:.2f}"]
    yield (*cells, f"{own['devices in use']:.0%}", f"{own['changes of running jobs']:.0f}")


TABLE = Table(
    "Jobs",
    "405 jobs of Rubick's base workload on 64 A800 (by calculation): policies of `autopar schedule` beside what owners"
    " ask for, first come, first served. Steps of GPT-2 and T5 are measured, of the others predicted (job_steps.csv)."
    " Devices are alike and placed densely. Published for this idea: up to 3.2 times in mean completion, 1.4 in"
    " makespan.",
    ("policy", "mean, h", "times", "p99, h", "times", "makespan, h", "times", "in use", "changes"),
    tuple(_name(change_s, policy) for change_s in CHANGES_S for policy in POLICIES),
    _cells,
)


def _end_cells(row: Row) -> Iterable[tuple[str, ...]]:
    times = (f"{row[key]:.2f}" for key in ("submitted_h", "started_h", "ended_h"))
    yield row["row"], row["job"], f"{row['devices']}", *times, f"{row['without_h']:.2f}", f"{row['in_use']:.0%}"


ENDS = Table(
    "What the makespan waits for",
    "The job that ends last under each policy (a change takes 60 s): how many devices its owner asks for, when it was"
    " submitted, started and ended, when all others had ended, and the devices in use until the last submission, after"
    " 13.21 h. A makespan of 1.3 times less than as asked is 15.74 h. By gain, a job of 48 devices waits while others"
    " of less work come, and runs alone at the end, for 2.2 h on all devices.",
    (
        "policy",
        "ends last",
        "asks for",
        "submitted, h",
        "started, h",
        "ended, h",
        "others ended, h",
        "in use until 13.21 h",
    ),
    tuple(POLICIES),
    _end_cells,
)


def _end(name: str, log: JobLog) -> Row:
    *_, other, last = sorted(log.jobs, key=lambda job: log.ended_s[job.name])
    until_s = max(job.submitted_s for job in log.jobs)
    used = sum(max(0.0, min(each.end_s, until_s) - each.start_s) * each.share.devices for each in log.intervals)
    hours = {"submitted_h": last.submitted_s, "started_h": log.started_s[last.name], "ended_h": log.ended_s[last.name]}
    hours |= {"without_h": log.ended_s[other.name]}
    told = {"row": name, "job": last.name, "devices": last.devices, "in_use": used / (until_s * log.num_devices)}
    return told | {key: seconds / 3600 for key, seconds in hours.items()}


def logs(change_s: float) -> dict[str, JobLog]:
    """The log of every policy."""
    jobs, curves = read_jobs(DATA / "rubick_jobs.csv"), read_curves([STEPS])
    check_jobs(jobs, curves, DEVICES)
    return {name: simulate_jobs(jobs, curves, DEVICES, policy, change_s=change_s) for name, policy in POLICIES.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all policies and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="make the file of steps anew")
    if parser.parse_args(arguments).predict:
        predict()
    rows = []
    for change_s in CHANGES_S:
        found = logs(change_s)
        rows += [
            {"row": _name(change_s, name), "figures": figures(log), "asked": figures(found["asked"])}
            for name, log in found.items()
        ]
        if change_s == CHANGES_S[1]:
            ends = [_end(name, log) for name, log in found.items()]
            draw_jobs(found, RESULTS / "jobs.png")
    add("jobs", [TABLE, ENDS], {TABLE.title: rows, ENDS.title: ends}, {})


if __name__ == "__main__":
    main()
