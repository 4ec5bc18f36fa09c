"""The best plans by hand that makers of libraries publish for H100, and the plans found for the same devices, batch and
sequence, both at the planner's prices; no device is used.

    python -m bench.published [--rows 'qwen'] [--resume]

A published plan is that of `bench.fidelity`, at the price of what this runtime would do: no library's overlap. Both
take bfloat16 and the preset's rates and memory.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
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


def _rows() -> dict[str, WrittenPlan]:
    """Name -> plan; rows that differ in what was measured only are one."""
    return {_name(row): row.written for rows in (torchtitan_rows(), nvidia_rows()) for row in rows}


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
    " predicted to take more than the memory of a device, the plan found may take as much. Gap: to the bound of plans"
    " like it.",
    (
        "published plan",
        "its step, s",
        "GiB",
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
            found = measure(name, plans[name])
        except AutoparError as error:
            found = {"row": name, "error": str(error)}
        add("published", [TABLE], {TABLE.title: [found]}, {"time_limit_s": LIMIT_S})


if __name__ == "__main__":
    main()
