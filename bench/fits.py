"""Settings in which no plan fits: the changes that `autopar fit` tells, and how close each is to one that does not fit.

python -m bench.fits [--rows 'gpt2'] [--resume]
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopar.answers.smallest_change import ENOUGH, SmallestChange
from autopar.answers.step_terms import AnyPlan
from autopar.cli.fit_command import FitTask, smallest_changes
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import InfeasibleError
from autopar.mesh import parse_devices
from autopar.planner.request import PlanRequest
from autopar.units import format_bytes
from bench.report import Row, Table, add
from bench.rows import parser, selected


@dataclass(frozen=True, slots=True)
class Tight:
    """A model that does not fit: a target with sizes, on a mesh whose devices have `share` of the least limit under
    which a plan is found.
    """

    target: str
    sizes: tuple[tuple[str, int], ...]
    mesh: str
    cluster: str
    share: float

    @property
    def name(self) -> str:
        """The name of its row."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes)
        return f"{self.target} ({sizes}) on {self.mesh} {self.cluster}, {self.share:.0%}"


_GPT = (("layers", 2), ("batch", 16), ("sequence", 512))
_LLAMA = (("layers", 2), ("batch", 8), ("sequence", 1024))
_BERT, _T5 = ((("layers", 2), ("batch", batch)) for batch in (32, 16))
_VIT = (("layers", 2), ("batch", 64))
TIGHT = (
    Tight("gpt2", _GPT, "dp=2,tp=2", "h100", 0.85),
    Tight("gpt2", _GPT, "4", "h100", 0.6),
    Tight("gpt2", _GPT, "pp=2,dp=2", "a100", 0.85),
    Tight("llama3-8b", _LLAMA, "dp=2,tp=4", "h100", 0.85),
    Tight("llama3-8b", _LLAMA, "8", "h100", 0.6),
    Tight("bert-large", _BERT, "dp=2,tp=2", "v100-25g", 0.85),
    Tight("bert-large", _BERT, "2", "p100", 0.6),
    Tight("t5-large", _T5, "dp=2,tp=2", "a100", 0.85),
    Tight("vit-l", _VIT, "2x2", "v100-25g", 0.85),
    Tight("vit-l", _VIT, "4", "v100-25g", 0.6),
    Tight("vgg13", (("batch", 32),), "2x2", "p100", 0.85),
    Tight("resnet50", (("batch", 32),), "4", "v100-50g", 0.85),
)
# Of each plan. Searches of models so small end before, unless others use the machine too.
_TIME_LIMIT_S = 120.0
# The least memory is looked for between this share of what the unlimited plan takes, which does not fit, and that.
_NEXT_TO_NOTHING = 2**-10


def _told(change: SmallestChange) -> str:
    if change.plan is None:
        return f"{change.what}: none"
    return f"{change.what}: {change.after} (not {change.refused})"


def _cells(row: Row) -> Iterable[tuple[str, ...]]:
    yield row["row"], format_bytes(row["limit_bytes"]), "; ".join(row["changes"]), f"{row['cpu_s']:.0f}"


TABLE = Table(
    "What would fit",
    "Settings in which no plan is found (by calculation): the limit is a share of the least one under which one is."
    " Each change alone makes a plan fit whose predicted peak is within the limit; in brackets the nearest value that"
    " was searched and has no plan.",
    ("setting", "limit", "changes", "CPU s"),
    tuple(tight.name for tight in TIGHT),
    _cells,
)


def measure(tight: Tight) -> Row:
    """The changes for one setting."""
    print(tight.name, file=sys.stderr, flush=True)
    cluster = load_cluster(tight.cluster)
    task = FitTask(tight.target, parse_devices(tight.mesh), cluster, _within(None), tight.sizes)
    task, start = replace(task, request=_too_little(task, tight.share)), time.process_time()
    changes = list(smallest_changes(task, lambda _: None))
    limit_bytes = task.request.memory_limit_bytes
    for change in changes:
        if change.plan is not None and change.what != "memory of a device":
            assert max(change.plan.peak_bytes) <= limit_bytes, change
    told, cpu_s = [_told(change) for change in changes], time.process_time() - start
    return {"row": tight.name, "limit_bytes": limit_bytes, "changes": told, "cpu_s": cpu_s}


def _within(limit_bytes: float | None) -> PlanRequest:
    return PlanRequest(memory_limit_bytes=limit_bytes, time_limit_s=_TIME_LIMIT_S)


def _too_little(task: FitTask, share: float) -> PlanRequest:
    """A request with a `share` of the least limit that was found to do; less if a plan is found even for that, which a
    search has missed before that ended by its time.
    """
    limit_bytes = share * _least_bytes(task)
    while True:
        request = _within(limit_bytes)
        try:
            task.plan(request=request)
        except InfeasibleError:
            return request
        limit_bytes *= share


def _least_bytes(task: FitTask) -> float:
    """The least limit under which a plan is found: above that plan's predicted peak, as the estimates are that a search
    goes by.
    """
    ample = float(max(task.plan().peak_bytes))

    def attempt(num_bytes: float) -> AnyPlan:
        return task.plan(request=_within(num_bytes))

    refused, fits = ample * _NEXT_TO_NOTHING, ample
    while fits > ENOUGH * refused:
        middle = (fits * refused) ** 0.5
        try:
            attempt(middle)
            fits = middle
        except InfeasibleError:
            refused = middle
    return fits


def main(arguments: list[str] | None = None) -> None:
    """Tell the changes for the settings that are asked for."""
    wanted = selected([TABLE], parser(__doc__).parse_args(arguments), "fits")[TABLE.title]
    for tight in TIGHT:
        if tight.name in wanted:
            add("fits", [TABLE], {TABLE.title: [measure(tight)]}, {})


if __name__ == "__main__":
    main()
