"""The plan found, stages and all, beside every plan in stages that a person might write, under the same prices and memory limit.

    python -m bench.stages [--rows REGEX]

Nothing is run: steps are predicted by the cost model, for the plan found and the plans by hand alike. Rows are measured in processes of
their own.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.report import Section, save_sections
from bench.spawn import measured
from bench.suite import STAGED, Case

TEXT = (
    "Model in to plan out on a number of devices, which the search factorises into stages, data and tensor axes. By hand: every product "
    "pp x dp x tp with tp within two nodes, every schedule (1F1B, GPipe, zero-bubble, interleaved with 2 and 4 stages a rank), every "
    "number of microbatches, ddp, ZeRO-2 and ZeRO-3, with and without sequence parallelism, as many layers on each stage or balanced "
    "cuts, none, all or as few blocks recomputed as fit. Memory is the most of a device, as a part of what it may take. Gain: the best by "
    "hand / the plan."
)
HEADER = (
    "model", "cluster", "devices", "batch", "plan", "step, ms", "at least, ms", "memory", "stages, microbatches", "best by hand",
    "its step, ms", "gain", "plans by hand that fit", "model to plan, s", "CPU, s", "peak, MiB", "by hand, CPU s",
)  # fmt: skip


def cells(case: Case, row: Mapping[str, Any]) -> tuple[str, ...]:
    """One line."""
    if "error" in row:
        return (case.model, case.cluster, case.mesh, str(case.batch), row["error"][:200], *[""] * (len(HEADER) - 5))
    hand = row["hand"] or "none fits", _ms(row["hand_s"]), f"{row['hand_s'] / row['step_s']:.2f}x" if row["hand_s"] else "-"
    found = row["mesh"], _ms(row["step_s"]), _ms(row["bound_s"]), f"{row['memory_share']:.0%}", row["schedule"]
    times = f"{row['plan_s']:.1f}", f"{row['cpu_s']:.1f}", f"{row['peak_bytes'] / 2**20:.0f}", f"{row['by_hand_cpu']:.1f}"
    return (case.model, case.cluster, case.mesh, str(case.batch), *found, *hand, str(row["num_hand"]), *times)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.4g}"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and save; ends with 1 if a plan by hand is better than the one found, or if the one found does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose model, cluster and number of devices match")
    settings = parser.parse_args(arguments)
    cases = [case for case in STAGED if re.search(settings.rows, case.title)]
    rows = []
    for case in cases:
        print(case.title, file=sys.stderr)
        rows.append({**asdict(case), **measured("stages", case, repeat=1)})
    section = Section("stages", TEXT, HEADER, tuple(map(cells, cases, rows)), tuple(rows))
    print(save_sections("stages", [section], {"command": "python -m bench.stages", "rows": settings.rows or "all"}))
    print("written to bench/results/stages.md and stages.json")
    worse = [row for row in rows if "error" in row or not is_as_good(row)]
    sys.exit(1 if worse else 0)


def is_as_good(row: Mapping[str, Any]) -> bool:
    """Whether the plan fits and no plan by hand is faster."""
    return row["memory_share"] <= 1 and (row["hand_s"] is None or row["step_s"] <= row["hand_s"] * (1 + 1e-9))


if __name__ == "__main__":
    main()
