"""TAP (arXiv:2302.00247): how long it takes from a model to its plan, for the GPT-39B whose search took Alpa 2393 s."""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product

import autopar
from autopar.models.catalogue import build_model
from bench.papers.section import Paper, table
from bench.report import Row

MODEL, CLUSTER = "gpt-39b", "v100-25g"
ALPA_S = 2393.0
TAP_TIMES_FASTER = (20, 160)
LIMITS: Mapping[str, float | None] = {"none": math.inf, "14.4 GiB a device": None}


def row_name(mesh: str, limit: str) -> str:
    """
    >>> row_name("8x8", "none")
    'TAP, 8x8, memory limit none'
    """
    return f"TAP, {mesh}, memory limit {limit}"


def measure(mesh: str, limit: str, layers: int | None = None) -> Mapping[str, Sequence[Row]]:
    """One mesh with and without a memory limit, timed once."""
    example = build_model(MODEL, layers=layers)
    start = time.perf_counter(), time.process_time()
    plan = autopar.plan(
        example.model, mesh, cluster=CLUSTER, args=example.args, kwargs=example.kwargs, memory_limit_bytes=LIMITS[limit]
    )
    wall_s, cpu_s = time.perf_counter() - start[0], time.process_time() - start[1]
    slowest, fastest = (ALPA_S / times for times in TAP_TIMES_FASTER)
    values = (
        mesh,
        limit,
        wall_s,
        cpu_s,
        ALPA_S,
        f"{fastest:.0f} to {slowest:.0f}",
        ALPA_S / wall_s,
        str(plan.mesh),
        plan.step_s,
        100 * plan.gap,
    )
    return {TITLE: [{"row": row_name(mesh, limit)} | dict(zip(COLUMNS, values))]}


TITLE = "TAP: model in to plan out"
COLUMNS = (
    "mesh",
    "memory limit",
    "ours, s",
    "CPU s of this process",
    "Alpa, published, s",
    "TAP, by its range, s",
    "times faster than Alpa",
    "our plan",
    "its step, predicted, s",
    "distance to our bound, %",
)
SETTINGS = {
    "model": (
        "GPT-39B as built in: 48 layers, hidden 8192, 64 heads, sequence 1024, vocabulary 51200, 8 sequences, float16,"
        " AdamW"
    ),
    "cluster": f"64 V100, preset {CLUSTER}: 8 a node on NVLink, 25 Gbit/s a node",
    "ours": (
        "autopar.plan(model on the meta device, mesh), stages and the check of the peak included; no device is used;"
        " one run"
    ),
    "Alpa": (
        "Zheng et al., 2022, table 5: batch 1024; its time includes compiling and profiling stages on the cluster, ours"
        " does not"
    ),
}
NOT_KNOWN = (
    (
        "TAP's own seconds for GPT-39B: 20 to 160 times is its abstract's range over its models, applied here to Alpa's"
        " time"
    ),
    "on which processor TAP's times were taken",
)
NOTES = (
    (
        "the time is wall time and depends on what else the machine does; the CPU time leaves out a solver in a process"
        " of its own"
    ),
)
_CASES = {row_name(*one): partial(measure, *one) for one in product(("64", "8x8"), LIMITS)}
TAP = Paper(
    "TAP",
    'Shi et al., 2023, "TAP: Accelerating Large-Scale DNN Training Through Tensor Automatic Parallelisation",'
    " arXiv:2302.00247",
    SETTINGS,
    NOT_KNOWN,
    NOTES,
    (table(TITLE, COLUMNS, _CASES),),
    _CASES,
)
