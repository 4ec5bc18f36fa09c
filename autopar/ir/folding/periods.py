"""Periodic runs in a sequence of numbers."""

from dataclasses import dataclass

import numpy as np

# A period is the distance of a number to one of its next occurrences; within a period a number may occur a few times.
_NUM_NEXT = 4


@dataclass(frozen=True, slots=True, order=True)
class PeriodicRun:
    """A maximal periodic run: `sequence[i] == sequence[i + period]` for all i in [start, stop - period)."""

    start: int
    stop: int
    period: int


def find_runs(sequence: np.ndarray) -> list[PeriodicRun]:
    """Every maximal run of at least two periods in i64[n], longest first, then shortest period.

    >>> find_runs(np.array([7, 1, 2, 1, 2, 1, 9]))
    [PeriodicRun(start=1, stop=6, period=2)]
    """
    runs = [run for period in _candidate_periods(sequence) for run in _runs_of(sequence, period)]
    return sorted(runs, key=lambda run: (run.start - run.stop, run.period, run.start))


def _candidate_periods(sequence: np.ndarray) -> list[int]:
    order = np.argsort(sequence, kind="stable")
    periods: set[int] = set()
    for ahead in range(1, _NUM_NEXT + 1):
        near, far = order[:-ahead], order[ahead:]
        periods.update((far - near)[sequence[near] == sequence[far]].tolist())
    return sorted(period for period in periods if 2 * period <= len(sequence))


def _runs_of(sequence: np.ndarray, period: int) -> list[PeriodicRun]:
    equal = np.concatenate(([False], sequence[:-period] == sequence[period:], [False]))
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    return [
        PeriodicRun(int(start), int(stop) + period, period)
        for start, stop in edges.reshape(-1, 2)
        if stop - start >= period
    ]
