"""Measurements in processes of their own, so that the peak memory of each is its own."""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from time import monotonic
from typing import Any

import psutil

from bench.suite import Case

# A runaway measurement must not take the machine with it.
ADDRESS_SPACE_BYTES = 20 * 2**30
TIMEOUT_S = 900.0
_POLL_S = 0.02


def measured(kind: str, case: Case, *, repeat: int) -> dict[str, Any]:
    """`bench.measure`'s row with the median of its times and its largest "peak_bytes", or its "error"."""
    rows = [_once(kind, case) for _ in range(repeat)]
    failed = next((row for row in rows if "error" in row), None)
    if failed is not None:
        return failed
    return median_of(rows) | {"peak_bytes": max(row["peak_bytes"] for row in rows)}


def median_of(rows: list[Any]) -> Any:
    """The first of `rows`, in which every number whose key ends in "_s" is the median over all; also inside mappings
    and lists.

    >>> median_of([{"step_s": 1.0, "gap": 0.1}, {"step_s": 3.0, "gap": 0.3}, {"step_s": 2.0, "gap": 0.2}])
    {'step_s': 2.0, 'gap': 0.1}
    """
    first = rows[0]
    if isinstance(first, Mapping):
        return {key: _median(key, [row[key] for row in rows]) for key in first}
    if isinstance(first, list):
        return [median_of(list(same)) for same in zip(*rows)]
    return first


def _median(key: str, found: list[Any]) -> Any:
    if key == "times_s":
        return {stage: median(times[stage] for times in found) for stage in found[0]}
    is_time = key.endswith("_s") and all(isinstance(x, float) for x in found)
    return median(found) if is_time else median_of(found)


def _once(kind: str, case: Case) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.measure", kind, json.dumps(asdict(case)), str(monotonic())]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with subprocess.Popen(command, stdout=out, stderr=err) as child:
            resource.prlimit(child.pid, resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
            peak_bytes = _watched(child)
        out.seek(0), err.seek(0)
        if child.returncode:
            said = err.read().decode(errors="replace").strip().splitlines()
            return {"error": f"ended with {child.returncode}: {said[-1] if said else 'nothing said'}"}
        return json.loads(out.read().decode().splitlines()[-1]) | {"peak_bytes": peak_bytes}


def _watched(child: subprocess.Popen) -> int:
    """Wait for the process, killing it when its time is up; the most resident bytes that it and its children had at one
    time.
    """
    deadline, most = monotonic() + TIMEOUT_S, 0
    process = psutil.Process(child.pid)
    while True:
        try:
            child.wait(_POLL_S)
            return most
        except subprocess.TimeoutExpired:
            most = max(most, _resident_bytes(process))
        if monotonic() > deadline:
            for running in (*process.children(recursive=True), process):
                running.kill()


def _resident_bytes(process: psutil.Process) -> int:
    total = 0
    try:
        for running in (process, *process.children(recursive=True)):
            total += running.memory_info().rss
    except psutil.NoSuchProcess:  # ended while we looked
        pass
    return total
