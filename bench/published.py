"""The best plans by hand that makers of libraries publish for H100, and the plans found for the same devices, batch and
sequence, both at the planner's prices; no device is used.

    python -m bench.published [--rows 'qwen'] [--resume]

A published plan is that of `bench.fidelity`, at the price of what this runtime would do: no library's overlap. Both
take bfloat16 and the preset's rates and memory.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from time import process_time

from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.training import Training
from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Devices
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from bench.fidelity.h100_rows import nvidia_rows, torchtitan_rows
from bench.fidelity.peak_bytes import peak_bytes
from bench.fidelity.published_rows import Published
from bench.fidelity.written_plans import Library, WrittenPlan, step_s
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected

CLUSTER = PRESETS["h100"]
LIMIT_S = 120.0  # of planning, for each row


@cache
def _rows() -> dict[str, list[Published]]:
    """Name -> rows, which differ in what was measured only."""
    found: dict[str, list[Published]] = {}
    for row in chain(torchtitan_rows(), nvidia_rows()):
        found.setdefault(_name(row), []).append(row)
    return found


def measured(name: str) -> tuple[float, str]:
    """The least published seconds of a step in a row's steps in bfloat16, or in fp8 if none is, and which of the two.

    >>> measured("torchtitan-2024-12 llama3.1-8b, 8 GPUs, fsdp=8, sequence 8192")[1]
    'bf16'
    """
    steps = [(row.measured_s, next(one for one in ("bf16", "fp8") if f", {one}," in row.name)) for row in _rows()[name]]
    return min(steps, key=lambda step: (step[1], step[0]))


def in_short(row: Row) -> Cells:
    """The line of a row in the README: its plan found, the step of that over the published one's, and what is
    `measured`.
    """
    plan, step_s = row["found"]["plan"], row["found"]["step_s"]
    return row["row"], plan, f"{step_s / row['published']['step_s']:.2f}", f"{step_s:.2f}", _measured(row)


def _measured(row: Row) -> str:
    return "{:.2f} ({})".format(*measured(row["row"]))


def over_measured(rows: Sequence[Row]) -> tuple[list[float], list[str]]:
    """The steps of the plans found over those measured in bfloat16, and the models for which it is above 1."""
    steps = ((row, *measured(row["row"])) for row in rows)
    ratios = [
        (row["row"].split(",")[0], row["found"]["step_s"] / step_s) for row, step_s, kind in steps if kind == "bf16"
    ]
    return [ratio for _, ratio in ratios], sorted({name.split()[-1] for name, ratio in ratios if ratio > 1})


def _name(row: Published) -> str:
    """The source's name for a row without its precision and technique."""
    source_and_plan, sequence, *_ = row.name.split(", sequence ")
    *_, technique = row.name.split(", ")
    stages = " interleaved" * ("interleaved" in technique)
    return f"{source_and_plan}, sequence {sequence.split(', ')[0]}{stages}"


def _cells(row: Row) -> Iterable[Cells]:
    published, found = row["published"], row["found"]
    yield (
        row["row"],
        f"{published['step_s']:.3f}",
        f"{published['gib']:.1f}",
        _measured(row),
        found["plan"],
        f"{found['step_s']:.3f}",
        f"{found['gib']:.1f}",
        f"{found['gap']:.1%}",
        f"{found['step_s'] / published['step_s']:.3f}",
        f"{row['planning_cpu_s']:.0f}",
    )


TABLE = Table(
    "published plans",
    "The best plans by hand that are published for H100 and the plans found, by calculation: both priced for the same"
    f" devices ({CLUSTER.name}), batch and sequence, in bfloat16 with float32 masters. Where a published plan is"
    " predicted to take more than the memory of a device, the plan found may take as much. As published: the step that"
    " its authors measured, with what their libraries overlap and with their kernels, in the precision named. Gap: to"
    " the bound of plans like it.",
    (
        "published plan",
        "its step, s",
        "GiB",
        "as published, s",
        "plan found",
        "its step, s",
        "GiB",
        "gap",
        "found / published",
        "planning, CPU s",
    ),
    tuple(_rows()),
    _cells,
)


def measure(name: str, written: WrittenPlan) -> Row:
    """The row of a published plan."""
    start = process_time()
    example = written.build(layers=written.num_layers)
    graph = trace(skeleton(example.model), example.args, dict(example.kwargs))
    devices = written.data * written.tensor * written.stages * written.sequence
    num_bytes = peak_bytes(written, CLUSTER, Library())
    limit_bytes = max(usable_memory_bytes(CLUSTER), num_bytes)
    cluster = replace(CLUSTER, memory_bytes=max(CLUSTER.memory_bytes, math.ceil(limit_bytes)))
    request = PlanRequest(training=Training(written.optimizer), memory_limit_bytes=limit_bytes, time_limit_s=LIMIT_S)
    plan = choose_plan(graph, Devices(devices), cluster, request, predict=rank_peaks)
    planning_s = process_time() - start
    return {
        "row": name,
        "published": {"step_s": step_s(written, CLUSTER), "gib": num_bytes / 2**30},
        "found": {
            "plan": str(plan.mesh),
            "step_s": plan.step_s,
            "gib": max(plan.peak_bytes or plan.memory_bytes) / 2**30,
            "gap": 1 - plan.lower_bound_s / plan.step_s,
        },
        "planning_cpu_s": planning_s,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the rows that are asked for; each is saved as soon as it is done."""
    settings, plans = parser(__doc__).parse_args(arguments), _rows()
    for name in selected([TABLE], settings, "published")[TABLE.title]:
        print(name, file=sys.stderr, flush=True)
        try:
            found = measure(name, plans[name][0].written)
        except AutoparError as error:
            found = {"row": name, "error": str(error)}
        add("published", [TABLE], {TABLE.title: [found]}, {"time_limit_s": LIMIT_S})


if __name__ == "__main__":
    main()
