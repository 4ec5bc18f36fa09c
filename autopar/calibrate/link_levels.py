"""Link levels: which ranks share a host, and where among neighbours bandwidth steps."""

import os
import socket
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from autopar.errors import AutoparError

# Links whose bandwidths differ by less count as one level: links of two kinds differ by twice and more (the links of
# `costmodel.cluster.presets`), repeated measurements by some tenths.
STEP = 1.5
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The host of this process: its name, and its boot, which tells hosts of one name apart.

    A network namespace of its own makes a host of its own: what joins it to others is a network.
    """
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else ""
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {boot} {namespace}"


def host_name(host: str) -> str:
    """The part of a `host_id` for people."""
    return host.split(" ")[0]


def ranks_per_host(hosts: Sequence[str]) -> int:
    """The number of ranks on each host, from the host of each rank; AutoparError unless ranks fill equal hosts one
    after the other.

    >>> ranks_per_host(["a", "a", "b", "b"])
    2
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    if len({host for host, _ in runs}) < len(runs):
        raise AutoparError(
            "calibrate: expected neighbouring ranks on the same host, found ranks on"
            f" {', '.join(host_name(host) for host, _ in runs)} in turn; number the ranks host by host, as torchrun"
            " does"
        )
    if len({count for _, count in runs}) > 1:
        found = ", ".join(f"{count} on {host_name(host)}" for host, count in runs)
        raise AutoparError(
            f"calibrate: expected the same number of ranks on every host, found {found}; start the same number on each"
        )
    return runs[0][1]


def strides(num_ranks: int, per_host: int) -> list[tuple[int, int]]:
    """(distance of two neighbours, ranks of the block that both lie in) for which bandwidth may differ, from the inside
    out: each divisor of a host's ranks, then of the number of hosts.

    >>> strides(8, 4), strides(6, 3), strides(4, 4)
    ([(1, 4), (2, 4), (4, 8)], [(1, 3), (3, 6)], [(1, 4), (2, 4)])
    """
    inside = [(size, per_host) for size in range(1, per_host) if per_host % size == 0]
    num_hosts = num_ranks // per_host
    return inside + [(size * per_host, num_ranks) for size in range(1, num_hosts) if num_hosts % size == 0]


def level_sizes(num_ranks: int, per_host: int, bandwidths: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes of the link levels, from the inside out, whose product is the number of ranks.

    `bandwidths`: distance -> bytes/s between pairs of ranks that far apart, of all at once. Blocks of ranks are a level
    where pairs that reach beyond them are slower by `STEP` than pairs inside. Hosts are blocks in any case.

    >>> level_sizes(8, 4, {1: 100.0, 2: 95.0, 4: 10.0})
    (4, 2)
    >>> level_sizes(8, 8, {1: 100.0, 2: 40.0, 4: 41.0})  # two devices at one switch
    (2, 4)
    """
    sizes, inside, fastest = [], 1, 0.0
    for distance in sorted(bandwidths):
        is_step = distance == per_host or bandwidths[distance] * STEP < fastest
        if is_step and distance > inside and distance % inside == 0:
            sizes.append(distance // inside)
            inside, fastest = distance, 0.0
        fastest = max(fastest, bandwidths[distance])
    return (*sizes, num_ranks // inside)
