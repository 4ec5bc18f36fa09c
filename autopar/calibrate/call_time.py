"""Timing of short pieces of work on this rank's device."""

import math
import time
from collections.abc import Callable
from functools import lru_cache
from statistics import median

import torch

TRIALS = 3
_MOST_CALLS = 2000
_MOST_QUEUED = 4  # calls whose kernels, some hundreds, a GPU takes into its queue before a launch waits
_HELD_SIZE = 4096  # of the products that hold the queue
_LEAST_HOLD_S = 0.01  # for as long a GPU does products before it is timed, at the clock rates that it can keep up
_ATTEMPTS = 4
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
    """Seconds that the device takes for a call of `work`: the median over blocks of calls that take about `budget_s`
    together.

    A GPU is given work faster than it does it by a step of a large model, and slower by a call alone, of which its
    time is meant here: calls wait in its queue, behind products, until all of a block are issued.
    """
    work()
    synchronize(device)
    count = calls_within(block_s(work, 1, device), budget_s / TRIALS)
    if device.type == "cpu":
        return median(block_s(work, count, device) for _ in range(TRIALS))
    return median(_queued_s(work, min(count, _MOST_QUEUED), device) for _ in range(TRIALS))


def calls_within(one_s: float, budget_s: float) -> int:
    """The number of calls of `one_s` seconds that fill `budget_s`."""
    return max(1, min(_MOST_CALLS, int(budget_s / max(one_s, 1e-7))))


def _queued_s(work: Work, count: int, device: torch.device) -> float:
    """Seconds of each of `count` calls in a row between two events of a GPU, which is busy until all are issued."""
    hold, hold_s = _hold(device)
    num_holds = 1 + math.ceil(max(_LEAST_HOLD_S, 2 * count * _issued_s(work, device)) / hold_s)
    for _ in range(_ATTEMPTS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(num_holds):
            hold()
        start.record()
        for _ in range(count):
            work()
        is_held = not start.query()
        end.record()
        synchronize(device)
        if is_held:
            break
        num_holds *= 2  # issuing took longer, or waits for the device by itself
    return start.elapsed_time(end) / 1e3 / count


def _issued_s(work: Work, device: torch.device) -> float:
    """Seconds until a call has returned, which need not be done then."""
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    synchronize(device)
    return seconds


@lru_cache
def _hold(device: torch.device) -> tuple[Work, float]:
    """Work that keeps a GPU busy, and its seconds."""
    x, y = torch.randn(2, _HELD_SIZE, _HELD_SIZE, dtype=torch.bfloat16, device=device).unbind()

    def hold() -> object:
        return torch.mm(x, x, out=y)

    hold()
    return hold, block_s(hold, 4, device)
