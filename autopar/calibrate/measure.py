"""`measure`: all timings of a calibration, the same on every rank."""

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.calibrate.call_time import call_s
from autopar.calibrate.link_levels import host_id, level_sizes, ranks_per_host, strides
from autopar.calibrate.probe_ops import (
    OpTime,
    UpdateTime,
    float8_flops_per_s,
    fresh_s_per_byte,
    memory_bound,
    of_rows,
    products,
    time_op,
    time_updates,
)
from autopar.calibrate.time_links import KINDS, CollectiveTime, Groups, TimedLinks
from autopar.costmodel.cluster.measured_terms import SharedCores

Tell = Callable[[str], None]
_MIB = 2**20
_COPIED_BYTES = 64 * _MIB
_STEP_BYTES = _MIB  # of the sends that show where bandwidth steps
_STEP_ROUNDS = 5
_SHORT_S = 0.1  # of an all-reduce
_MEMORY_DTYPES = (torch.float32, torch.bfloat16)  # the second on GPUs alone
# A rank that computes faster by less, while others wait, has its own cores; and the part of the seconds that all ranks
# take together from which on some are as slow as all.
_LEAST_SPEEDUP, _AS_SLOW = 1.25, 0.9
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Effort:
    """The extent of a calibration. `op_s`, `link_s`: seconds for each op and each collective of one size, long enough
    for processes that share a core to take turns many times; `sizes`: bytes of collectives.
    """

    is_quick: bool
    op_s: float
    link_s: float
    sizes: tuple[int, ...]


FULL = Effort(False, 0.06, 0.15, tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24)))
QUICK = Effort(True, 0.012, 0.03, tuple(2**power for power in (10, 16, 20, 22)))


@dataclass(frozen=True)
class OnRank:
    """The timings of one rank's device, made while all ranks make theirs.

    `products`: by dtype name. `tiny`: ops on next to nothing. `copy_bytes_per_s`: to the host's memory, one way.
    `float8_flops_per_s`: 0 of a device without such products. `fresh_s_per_byte`: as of `Cluster`.
    """

    products: dict[str, tuple[OpTime, ...]]
    memory_bound: tuple[OpTime, ...]
    tiny: tuple[OpTime, ...]
    updates: tuple[UpdateTime, ...]
    copy_bytes_per_s: float
    memory_bytes: int
    float8_flops_per_s: float = 0.0
    fresh_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Measured:
    """The timings of a calibration, the same on every rank.

    `hosts`: of each rank; `level_sizes`: of the link levels from the inside out; `date`: ISO 8601, by the first rank's
    clock, as the others' may be a second off; `links`: as `in_steps`; `overlap`, `shared_cores`: as of `Cluster`.
    """

    hosts: tuple[str, ...]
    level_sizes: tuple[int, ...]
    ranks: tuple[OnRank, ...]
    links: tuple[CollectiveTime, ...]
    date: str
    overlap: float = 0.0
    shared_cores: SharedCores | None = None


def measure(mesh: DeviceMesh, device: torch.device, effort: Effort, stall_s: float, tell: Tell) -> Measured:
    """The timings of all ranks of the one-dimensional `mesh` of the world; every rank calls this."""
    known: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(known, (host_id(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")))
    hosts, date = [host for host, _ in known], known[0][1]
    per_host = ranks_per_host(hosts)
    links = TimedLinks(device, stall_s, effort.link_s)
    try:
        dist.barrier(group=links.world)
        mine = measure_rank(mesh, links, effort, hosts.count(hosts[dist.get_rank()]), tell)
        ranks: list[OnRank] = [mine] * len(hosts)
        dist.all_gather_object(ranks, mine, group=links.world)
        levels, times = measure_links(links, len(hosts), per_host, effort, tell)
        overlap = measure_overlap(links, len(hosts), times, tell)
        times = in_steps(links, len(hosts), times, tell)
        cores = measure_cores(links, levels, tell)
    finally:
        links.close()
    return Measured(tuple(hosts), levels, tuple(ranks), tuple(times), date, overlap, cores)


def measure_rank(mesh: DeviceMesh, links: TimedLinks, effort: Effort, num_sharing: int, tell: Tell) -> OnRank:
    """The timings of this rank's device; `num_sharing` ranks share the host's memory."""
    device, by_dtype, in_memory = links.device, {}, list[OpTime]()
    for dtype in _dtypes(device, is_quick=effort.is_quick):
        tell(f"products of {dtype}")
        timed = (time_op(op, device, effort.op_s) for op in products(device, dtype, is_quick=effort.is_quick))
        by_dtype[str(dtype).removeprefix("torch.")] = tuple(timed)
    for dtype in _MEMORY_DTYPES[: 1 + (device.type != "cpu")]:
        tell(f"memory bandwidth of {dtype}")
        ops = memory_bound(device, dtype, is_quick=effort.is_quick)
        in_memory += [time_op(op, device, effort.op_s) for op in ops]
    tell("cost of a kernel, updates, copies")
    tiny = tuple(time_op(op, device, effort.op_s / 2) for op in of_rows(2))
    updates = tuple(time_updates(mesh, device, effort.op_s, is_quick=effort.is_quick))
    copied = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    copy_s = call_s(lambda: there.copy_(copied, non_blocking=True), device, effort.op_s)
    to_host, memory_bytes = _COPIED_BYTES / copy_s, _memory_bytes(device, num_sharing)
    float8 = float8_flops_per_s(device, effort.op_s)
    fresh = fresh_s_per_byte(device, effort.op_s)
    links.stay_busy()
    return OnRank(by_dtype, tuple(in_memory), tiny, updates, to_host, memory_bytes, float8, fresh)


def measure_links(
    links: TimedLinks, num_ranks: int, per_host: int, effort: Effort, tell: Tell
) -> tuple[tuple[int, ...], list[CollectiveTime]]:
    """(the sizes of the link levels, as `level_sizes` gives them; the timings of sends and collectives on them).

    `per_host`: ranks of a host. `tell`: called with what is measured next. One rank has no timings.
    """
    if num_ranks == 1:
        return (1,), []
    # the best of several rounds, as what else the machine does slows some sends and speeds none up
    bandwidths: dict[int, float] = {}
    for distance, block in strides(num_ranks, per_host) * _STEP_ROUNDS:
        tell(f"links between ranks {distance} apart")
        (sent,) = links.sends(Groups(2, distance, block), [_STEP_BYTES])
        bandwidths[distance] = max(bandwidths.get(distance, 0.0), sent.num_bytes / sent.seconds)
    sizes = level_sizes(num_ranks, per_host, bandwidths)
    return sizes, list(_on_levels(links, sizes, effort, tell))


def measure_overlap(links: TimedLinks, num_ranks: int, times: Sequence[CollectiveTime], tell: Tell) -> float:
    """The share of a collective during which products go on as fast as alone (`Cluster.overlap`); 0 for one rank.

    It is measured with the largest all-reduce of all ranks among `times` that is short.
    """
    of_all = [one for one in times if one.kind == "all_reduce" and one.groups.size == num_ranks]
    if not of_all:
        return 0.0
    tell("products during an all-reduce")
    short = [one.num_bytes for one in of_all if one.seconds <= _SHORT_S] or [min(one.num_bytes for one in of_all)]
    return links.overlap(Groups(num_ranks, 1, num_ranks), max(short))


def measure_cores(links: TimedLinks, level_sizes: Sequence[int], tell: Tell) -> SharedCores | None:
    """The cores that the ranks of the innermost link levels share; None if each has its own, as on GPUs.

    These are the fewest levels whose ranks slow each other down as much as all ranks do.
    """
    blocks: list[int] = list(accumulate(level_sizes, mul))
    if blocks[-1] == 1 or links.device.type != "cpu":
        return None
    tell("ranks that share cores")
    alone_s, *others_s = (links.computing_s(num_ranks) for num_ranks in (1, *blocks))
    speedup = others_s[-1] / alone_s
    if speedup < _LEAST_SPEEDUP:
        return None
    return SharedCores(next(n for n, s in zip(blocks, others_s) if s >= _AS_SLOW * others_s[-1]), speedup)


def in_steps(links: TimedLinks, num_ranks: int, times: Sequence[CollectiveTime], tell: Tell) -> list[CollectiveTime]:
    """The collectives as steps have them: later by as much as ranks that share cores keep the last one waiting."""
    if num_ranks == 1 or links.device.type != "cpu":
        return list(times)
    tell("waiting for ranks that compute")
    late_s = links.lateness_s(Groups(num_ranks, 1, num_ranks))
    return [timed if timed.kind == "p2p" else replace(timed, seconds=timed.seconds + late_s) for timed in times]


def _on_levels(links: TimedLinks, sizes: Sequence[int], effort: Effort, tell: Tell) -> Iterator[CollectiveTime]:
    inside = 1
    for number, size in enumerate(sizes):
        block = inside * size
        tell(f"sends on link level {number}")
        yield from links.sends(Groups(2, inside, block), effort.sizes)
        for members in _group_sizes(size, is_quick=effort.is_quick):
            for kind in KINDS:
                tell(f"{kind} of {members} on link level {number}")
                yield from links.collective(kind, Groups(members, inside, block), effort.sizes)
        inside = block
    if len(sizes) > 1:
        for kind in KINDS:
            tell(f"{kind} of all {inside} ranks")
            yield from links.collective(kind, Groups(inside, 1, inside), effort.sizes)


def _group_sizes(size: int, *, is_quick: bool) -> list[int]:
    """The sizes of groups to time on a level of `size`: its divisors, or the smallest and the largest."""
    divisors = [members for members in range(2, size + 1) if size % members == 0]
    return sorted({divisors[0], divisors[-1]}) if is_quick and divisors else divisors


def _dtypes(device: torch.device, *, is_quick: bool) -> tuple[torch.dtype, ...]:
    if device.type == "cpu":
        return (torch.float32,) if is_quick else (torch.float32, torch.bfloat16)
    return torch.float32, torch.bfloat16, torch.float16


def _memory_bytes(device: torch.device, num_sharing: int) -> int:
    """Bytes of memory of this rank's device: its part of the host's, or of its control group's, on a CPU."""
    if device.type != "cpu":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP.read_text().strip() if _CGROUP.is_file() else ""
    return min(total, int(limit) if limit.isdigit() else total) // num_sharing
