"""Jobs of a cluster, and how fast each model trains on a number of devices: the files of `autopar schedule`."""

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autopar.errors import AutoparError

# Columns that files of steps may have, each with one value for all rows of a model.
_SETTINGS = ("cluster", "batch")


@dataclass(frozen=True, slots=True)
class Job:
    """A training job as its owner submits it.

    `submitted_s`: from the start of the workload. `devices`, `plan`: what the owner asks for; `steps`: of training.
    """

    name: str
    submitted_s: float
    model: str
    devices: int
    plan: str
    steps: int


@dataclass(frozen=True)
class SpeedCurve:
    """The seconds of a step of one model: (number of devices, plan) -> seconds."""

    model: str
    rows: Mapping[tuple[int, str], float]

    @cached_property
    def _best(self) -> tuple[tuple[int, ...], tuple[float, ...], tuple[str, ...]]:
        """Numbers of devices that are faster than all smaller ones, their steps, and their plans."""
        sizes, steps, plans = list[int](), list[float](), list[str]()
        for (devices, plan), step_s in sorted(self.rows.items(), key=lambda row: (row[0][0], row[1])):
            if steps and step_s >= steps[-1]:
                continue
            if sizes and sizes[-1] == devices:
                continue
            sizes.append(devices)
            steps.append(step_s)
            plans.append(plan)
        return tuple(sizes), tuple(steps), tuple(plans)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of devices worth having, each faster than the one before."""
        return self._best[0]

    def step_s(self, devices: int) -> float:
        """Seconds of the best plan on at most so many devices; infinity where none is known."""
        at = bisect_right(self.sizes, devices) - 1
        return self._best[1][at] if at >= 0 else math.inf

    def plan_of(self, devices: int) -> str:
        """The best plan on at most so many devices."""
        return self._best[2][bisect_right(self.sizes, devices) - 1]

    def asked_s(self, job: Job) -> float:
        """Seconds of a step with what the owner asks for; AutoparError if nobody measured or predicted that."""
        if (step_s := self.rows.get((job.devices, job.plan))) is None:
            known = ", ".join(f"{plan} on {devices}" for devices, plan in list(self.rows)[:5])
            raise AutoparError(
                f"job {job.name} asks for {job.plan!r} on {job.devices} devices, and the steps of {self.model} have no"
                f" such row (they have {known}, ...): add it to the file of steps"
            )
        return step_s


def read_jobs(path: str | Path) -> tuple[Job, ...]:
    """The jobs of a CSV file with the columns job, submitted_s, model, devices, plan and steps, by time.

    AutoparError for a row that is no job.
    """
    jobs = [
        Job(
            row["job"],
            _number(path, line, row, "submitted_s", least=0),
            row["model"],
            int(_number(path, line, row, "devices", least=1)),
            row["plan"],
            int(_number(path, line, row, "steps", least=1)),
        )
        for line, row in _rows(path, ("job", "submitted_s", "model", "devices", "plan", "steps"))
    ]
    if len({job.name for job in jobs}) < len(jobs):
        raise AutoparError(f"{path}: two jobs have one name; give each its own")
    return tuple(sorted(jobs, key=lambda job: (job.submitted_s, job.name)))


def read_curves(paths: Iterable[str | Path]) -> dict[str, SpeedCurve]:
    """Model -> its curve, from CSV files with the columns model, devices, plan and step_s, as `autopar sweep` writes.

    Of rows for the same plan the last counts. AutoparError for a row that is none, and for rows of one model on several
    clusters or for several batches, of which steps are not comparable.
    """
    rows: dict[str, dict[tuple[int, str], float]] = {}
    settings: dict[tuple[str, str], str] = {}
    for path in paths:
        for line, row in _rows(path, ("model", "devices", "plan", "step_s")):
            devices = int(_number(path, line, row, "devices", least=1))
            step_s = _number(path, line, row, "step_s", least=0)
            if step_s == 0:
                raise AutoparError(f"{path}, line {line}: a step takes more than 0 seconds")
            for column in _SETTINGS:
                found = row.get(column)
                if found and found != (first := settings.setdefault((row["model"], column), found)):
                    raise AutoparError(
                        f"{path}, line {line}: steps of {row['model']} with {column} {found!r} beside those with"
                        f" {first!r}, which are not comparable: give files of one {column}"
                    )
            rows.setdefault(row["model"], {})[devices, row["plan"]] = step_s
    return {model: SpeedCurve(model, known) for model, known in rows.items()}


def check_jobs(jobs: Iterable[Job], curves: Mapping[str, SpeedCurve], num_devices: int) -> None:
    """AutoparError for a job whose steps nobody knows, or that asks for more devices than there are."""
    for job in jobs:
        if job.devices > num_devices:
            raise AutoparError(
                f"job {job.name} asks for {job.devices} devices, the cluster has {num_devices}: ask for fewer, or take"
                " a larger cluster"
            )
        if job.model not in curves:
            known = ", ".join(sorted(curves)) or "none"
            raise AutoparError(
                f"job {job.name} trains {job.model!r}, of which no steps are known (known: {known}): add rows with"
                " autopar sweep --csv"
            )
        curves[job.model].asked_s(job)


def _rows(path: str | Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise AutoparError(f"{path} cannot be read: {error}") from error
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise AutoparError(f"{path}: no column {', '.join(missing)}; expected {', '.join(columns)}")
    for line, row in enumerate(reader, 2):
        if any(row[column] is None for column in columns):
            raise AutoparError(f"{path}, line {line}: expected {len(columns)} cells, found {list(row.values())}")
        yield line, row


def _number(path: str | Path, line: int, row: Mapping[str, str], column: str, *, least: float) -> float:
    try:
        number = float(row[column])
    except ValueError:
        number = math.nan
    is_whole = column not in ("devices", "steps") or number == int(number if math.isfinite(number) else 0)
    if not math.isfinite(number) or number < least or not is_whole:
        kind = "a whole number" if column in ("devices", "steps") else "a number"
        raise AutoparError(f"{path}, line {line}: {column} expects {kind} of {least:g} or more, found {row[column]!r}")
    return number
