"""Timing of short pieces of work on this rank's device."""

import time
from collections.abc import Callable
from statistics import median

import torch

TRIALS = 3
_MOST_CALLS = 2000
Work = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Return once the device has done all work issued so far."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def block_s(work: Work, count: int, device: torch.device) -> float:
    """Seconds of each of `count` calls in a row."""
    start = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / count


def call_s(work: Work, device: torch.device, budget_s: float) -> float:
    """Seconds of a call of `work`: the median over blocks of calls that take about `budget_s` together."""
    work()
    synchronize(device)
    count = calls_within(block_s(work, 1, device), budget_s / TRIALS)
    return median(block_s(work, count, device) for _ in range(TRIALS))


def calls_within(one_s: float, budget_s: float) -> int:
    """The number of calls of `one_s` seconds that fill `budget_s`."""
    return max(1, min(_MOST_CALLS, int(budget_s / max(one_s, 1e-7))))
