"""Settings in which no plan fits: the changes that `autopar fit` tells, and how close each is to one that does not fit.

python -m bench.fits [--rows 'gpt2'] [--resume]
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.answers.smallest_change import SmallestChange
from autopar.cli.fit_command import FitTask, smallest_changes
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import InfeasibleError
from autopar.mesh import parse_devices
from autopar.planner.request import PlanRequest
from bench.report import Row, Table, add
from bench.rows import parser, selected


@dataclass(frozen=True, slots=True)
class Tight:
    """A model that does not fit: a target with sizes, on a mesh whose devices have `limit_mib`."""

    target: str
    sizes: tuple[tuple[str, int], ...]
    mesh: str
    cluster: str
    limit_mib: int

    @property
    def name(self) -> str:
        """The name of its row."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes)
        return f"{self.target} ({sizes}) on {self.mesh} {self.cluster}, {self.limit_mib} MiB"


_GPT = (("layers", 2), ("batch", 16), ("sequence", 512))
_BERT, _T5 = ((("layers", 2), ("batch", batch)) for batch in (32, 16))
TIGHT = (
    Tight("gpt2", _GPT, "dp=2,tp=2", "h100", 200),
    Tight("gpt2", _GPT, "4", "h100", 150),
    Tight("gpt2", _GPT, "pp=2,dp=2", "a100", 180),
    Tight("llama3-8b", (("layers", 2), ("batch", 8), ("sequence", 1024)), "dp=2,tp=4", "h100", 2000),
    Tight("llama3-8b", (("layers", 2), ("batch", 8), ("sequence", 1024)), "8", "h100", 1500),
    Tight("bert-large", _BERT, "dp=2,tp=2", "v100-25g", 300),
    Tight("bert-large", _BERT, "2", "p100", 400),
    Tight("t5-large", _T5, "dp=2,tp=2", "a100", 300),
    Tight("vit-l", (("layers", 2), ("batch", 64)), "2x2", "v100-25g", 150),
    Tight("vit-l", (("layers", 2), ("batch", 64)), "4", "v100-25g", 100),
    Tight("vgg13", (("batch", 32),), "2x2", "p100", 500),
    Tight("resnet50", (("batch", 32),), "4", "v100-50g", 120),
)


def _told(change: SmallestChange) -> str:
    if change.plan is None:
        return f"{change.what}: none"
    return f"{change.what}: {change.after} (not {change.refused})"


def _cells(row: Row) -> Iterable[tuple[str, ...]]:
    if row["fits"]:
        yield row["row"], "fits", ""
    else:
        yield row["row"], "; ".join(row["changes"]), f"{row['cpu_s']:.0f}"


TABLE = Table(
    "What would fit",
    "Settings in which no plan fits (by calculation). Each change alone makes a plan fit whose predicted peak is within"
    " the limit; in brackets the nearest value that was searched and has no plan.",
    ("setting", "changes", "CPU s"),
    tuple(tight.name for tight in TIGHT),
    _cells,
)


def measure(tight: Tight) -> Row:
    """The changes for one setting."""
    print(tight.name, file=sys.stderr, flush=True)
    start, cluster = time.process_time(), load_cluster(tight.cluster)
    request = PlanRequest(memory_limit_bytes=tight.limit_mib * 2.0**20)
    task = FitTask(tight.target, parse_devices(tight.mesh), cluster, request, tight.sizes)
    try:
        task.plan()
    except InfeasibleError:
        changes = list(smallest_changes(task, lambda _: None))
        for change in changes:
            if change.plan is not None and change.what != "memory of a device":
                assert max(change.plan.peak_bytes) <= request.memory_limit_bytes, change
        return {
            "row": tight.name,
            "fits": False,
            "changes": [_told(change) for change in changes],
            "cpu_s": time.process_time() - start,
        }
    return {"row": tight.name, "fits": True}


def main(arguments: list[str] | None = None) -> None:
    """Tell the changes for the settings that are asked for."""
    wanted = selected([TABLE], parser(__doc__).parse_args(arguments), "fits")[TABLE.title]
    for tight in TIGHT:
        if tight.name in wanted:
            add("fits", [TABLE], {TABLE.title: [measure(tight)]}, {})


if __name__ == "__main__":
    main()
