"""Hosts of different speeds: the timings of the slowest, how much slower some are, and which are alike."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import median

import numpy as np

from autopar.calibrate.link_levels import host_name
from autopar.calibrate.measure import Measured, OnRank
from autopar.calibrate.probe_ops import OpTime

# Hosts whose speeds differ by less count as alike, however small the fit's error is.
_LEAST_DIFFERENCE = 0.05


def slowest_of(measured: Measured) -> OnRank:
    """The timings of the slowest host: each the median of its ranks, then the largest of all hosts."""
    by_host: dict[str, list[OnRank]] = defaultdict(list)
    for host, rank in zip(measured.hosts, measured.ranks):
        by_host[host].append(rank)
    each = [_median_of(ranks) for ranks in by_host.values()]
    updates = zip(*(rank.updates for rank in each))
    return OnRank(
        {dtype: _slowest([rank.products[dtype] for rank in each]) for dtype in each[0].products},
        _slowest([rank.memory_bound for rank in each]),
        _slowest([rank.tiny for rank in each]),
        tuple(max(same, key=lambda update: update.seconds) for same in updates),
        min(rank.copy_bytes_per_s for rank in each),
        min(rank.memory_bytes for rank in each),
        min(rank.float8_flops_per_s for rank in each),
        max(rank.fresh_s_per_byte for rank in each),
    )


def _median_of(ranks: Sequence[OnRank]) -> OnRank:
    updates = zip(*(rank.updates for rank in ranks))
    return OnRank(
        {dtype: _medians([rank.products[dtype] for rank in ranks]) for dtype in ranks[0].products},
        _medians([rank.memory_bound for rank in ranks]),
        _medians([rank.tiny for rank in ranks]),
        tuple(replace(same[0], seconds=median(update.seconds for update in same)) for same in updates),
        median(rank.copy_bytes_per_s for rank in ranks),
        min(rank.memory_bytes for rank in ranks),
        median(rank.float8_flops_per_s for rank in ranks),
        median(rank.fresh_s_per_byte for rank in ranks),
    )


def _medians(rows: Sequence[Sequence[OpTime]]) -> tuple[OpTime, ...]:
    return tuple(
        OpTime(same[0].op, median(timed.forward_s for timed in same), median(timed.backward_s for timed in same))
        for same in zip(*rows)
    )


def _slowest(rows: Sequence[Sequence[OpTime]]) -> tuple[OpTime, ...]:
    return tuple(
        OpTime(same[0].op, max(timed.forward_s for timed in same), max(timed.backward_s for timed in same))
        for same in zip(*rows)
    )


def slow_hosts(measured: Measured, fit_error: float) -> dict[str, float]:
    """Host -> its times of ops over the fastest host's, where that exceeds 1 by more than the fit's error and 5 %."""
    typical = _typical_times(measured)
    fastest = min(typical.values())
    return {
        f"host {number} ({host_name(host)})": time / fastest
        for number, (host, time) in enumerate(typical.items())
        if _is_slower(time, fastest, fit_error)
    }


def runs_alike(measured: Measured, fit_error: float) -> list[Measured]:
    """The timings of each run of ranks whose hosts are alike, in the order of ranks; the links are those of all ranks.

    Hosts are alike if the slowest's times of ops exceed the fastest's by no more than the fit's error, or 5 %.
    """
    kinds: dict[str, int] = {}
    number, first_s = -1, 0.0
    for host, time in sorted(_typical_times(measured).items(), key=lambda item: item[1]):
        if number < 0 or _is_slower(time, first_s, fit_error):
            number, first_s = number + 1, time
        kinds[host] = number
    runs = []
    for _, run in groupby(zip(measured.hosts, measured.ranks), key=lambda pair: kinds[pair[0]]):
        hosts, ranks = zip(*run)
        runs.append(replace(measured, hosts=hosts, ranks=ranks))
    return runs


def _is_slower(time_s: float, other_s: float, fit_error: float) -> bool:
    return time_s / other_s > 1 + max(fit_error, _LEAST_DIFFERENCE)


def _typical_times(measured: Measured) -> dict[str, float]:
    """Host -> the geometric mean of its ops' times, each the median of its ranks."""
    times: dict[str, list[np.ndarray]] = defaultdict(list)
    for host, rank in zip(measured.hosts, measured.ranks):
        ops = [timed for products in rank.products.values() for timed in products] + list(rank.memory_bound)
        times[host].append(np.array([timed.forward_s + timed.backward_s for timed in ops]))
    return {host: float(np.exp(np.log(np.median(rows, axis=0)).mean())) for host, rows in times.items()}
