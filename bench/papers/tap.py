"""TAP (arXiv:2302.00247): how long it takes from a model to its plan, for the GPT-39B whose search took Alpa 2393 s."""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import autopar
from autopar.models import build_model
from autopar.plan.plan import Plan
from bench.papers.section import Section, Table

MODEL, CLUSTER = "gpt-39b", "v100-25g"
ALPA_S = 2393.0
TAP_TIMES_FASTER = (20, 160)
RUNS = 3


def tap(tell: Callable[[str], None], *, is_small: bool = False) -> Section:
    """The whole comparison; `is_small`: two layers on four devices, for a test."""
    rows = []
    example = build_model(MODEL, layers=2) if is_small else build_model(MODEL)
    for mesh in ("2x2",) if is_small else ("64", "8x8"):
        for limit, named in ((math.inf, "none"), (None, "14.4 GiB a device")):
            tell(f"{MODEL} on {mesh}, memory limit {named}")
            rows.append({"mesh": mesh, "memory limit": named} | _timed(example, mesh, limit, 1 if is_small else RUNS))
    published = tuple({"planner": name, "s": seconds} for name, seconds in _published())
    tables = Table("published", published), Table("ours, model in to plan out", tuple(rows))
    return Section("TAP", PAPER, SETTINGS, tables, NOT_FOUND, NOTES)


def _published() -> list[tuple[str, float]]:
    slowest, fastest = (ALPA_S / times for times in TAP_TIMES_FASTER)
    return [("Alpa, measured (Zheng et al., 2022, table 5)", ALPA_S), ("TAP at 20 times", slowest), ("TAP at 160 times", fastest)]


def _timed(example: Any, mesh: str, limit: float | None, runs: int) -> dict[str, Any]:
    wall, cpu, plan = [], [], None
    for _ in range(runs):
        start = time.perf_counter(), time.process_time()
        plan = _planned(example, mesh, limit)
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    assert plan is not None
    seconds = median(wall)
    return {
        f"s, median of {runs}": seconds,
        "CPU s of this process": median(cpu),
        "of the last: tracing, s": wall[-1] - sum(plan.timings.values()),
        "pricing, s": plan.timings["price"],
        "search, s": plan.timings["search"],
        "times faster than Alpa": ALPA_S / seconds,
        "step, s": plan.costs.step_s,
        "distance to our bound, %": 100 * plan.gap,
    }


def _planned(example: Any, mesh: str, limit: float | None) -> Plan:
    return autopar.plan(example.model, mesh, cluster=CLUSTER, args=example.args, kwargs=example.kwargs, memory_limit_bytes=limit)


PAPER = 'Shi et al., 2023, "TAP: Accelerating Large-Scale DNN Training Through Tensor Automatic Parallelisation", arXiv:2302.00247'
SETTINGS = {
    "model": "GPT-39B as built in: 48 layers, hidden 8192, 64 heads, sequence 1024, vocabulary 51200, 8 sequences, float16, AdamW",
    "cluster": f"64 V100, preset {CLUSTER}: 8 a node on NVLink, 25 Gbit/s a node",
    "ours": "autopar.plan(model on the meta device, mesh): tracing, folding, rules, prices, hand plans, search, lower bound; no "
    "device is used",
    "Alpa": "batch 1024; its time includes compiling and profiling stages on the cluster, and pipeline stages, which are not searched here",
}
NOT_FOUND = (
    "TAP's own seconds for GPT-39B: 20 to 160 times is its abstract's range over its models, applied here to Alpa's time",
    "on which processor TAP's times were taken",
)
NOTES = (
    "a plan here has tensor, data and sequence parallelism and sharded storage on one mesh; Alpa's has pipeline stages too, TAP's has not",
    "the time is wall time and depends on what else the machine does; the CPU time leaves out a solver in a process of its own",
)
