"""The links of p2p transfers between the stages of a pipeline, and the cores that its ranks share."""

import math
from typing import NamedTuple

import numpy as np

from autopar.costmodel.cluster.device_groups import ranks_of
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import group_rate

Times = float | np.ndarray


class RankLink(NamedTuple):
    """The link of a device of a rank of the pipeline to its peer on the next rank, one direction.

    `least_s`: seconds that a send takes at least, in which so many bytes move as buffers on the way take at once.
    `speedup`: how many times as fast the rank computes while all others wait, as while all compute; `cores`: the share
    of the cores that it then takes, 0 if it shares none.
    """

    latency_s: float
    bytes_per_s: float
    least_s: float = 0.0
    speedup: float = 1.0
    cores: float = 0.0

    def send_s(self, num_bytes: float) -> float:
        """Seconds of a send.

        >>> RankLink(1e-3, 1e6, least_s=4e-3).send_s(1000), RankLink(1e-3, 1e6, least_s=4e-3).send_s(5000)
        (0.004, 0.006)
        """
        return max(self.least_s, self.latency_s + num_bytes / self.bytes_per_s)


FREE = RankLink(0.0, math.inf)


def alone_and_cores(pass_s: Times, collective_s: Times, speedup: Times, cores: Times) -> tuple[Times, Times]:
    """`StageTimes.alone` and `StageTimes.cores` of a stage whose rank has this `speedup` and these `cores`.

    `pass_s`: seconds of forward and backward of a microbatch, of which `collective_s`, those of collectives, are no
    fewer if other ranks wait. Numbers, or arrays of numpy.

    >>> alone, cores = alone_and_cores(3.0, 1.0, 2.0, 0.5)
    >>> float(alone), float(cores)
    (0.6666666666666666, 0.25)
    """
    computed_s = np.maximum(pass_s - collective_s, 0.0) / speedup
    alone_s = computed_s + collective_s
    is_any = alone_s > 0
    least_s = np.where(is_any, alone_s, 1.0)
    return np.where(is_any, least_s / np.where(is_any, pass_s, 1.0), 1.0), cores * computed_s / least_s


def transfers(cluster: Cluster, num_ranks: int, num_devices: int) -> tuple[RankLink, ...]:
    """The link of each rank of the pipeline to the next, of the last one to the first. Of `num_devices` a rank.

    On a cluster of groups of devices, neighbours within a group are joined as on a cluster of these alone, others by
    the link between groups.
    """
    if cluster.groups is None or num_ranks == 1:
        speedup = speedup_alone(cluster, num_ranks, num_devices)
        cores = speedup / num_ranks if speedup > 1 else 0.0
        return (transfer(cluster, num_ranks, num_devices)._replace(speedup=speedup, cores=cores),) * num_ranks
    across, found = pair_link(cluster.groups.link), list[RankLink]()
    for ranks, (_, own) in zip(ranks_of(cluster, num_ranks), cluster.groups.members, strict=True):
        found += [transfer(own, len(ranks), num_devices)] * (len(ranks) - 1) + [across]
    return tuple(found)


def speedup_alone(cluster: Cluster, num_ranks: int, num_devices: int) -> float:
    """How many times as fast a rank of the pipeline computes while all others wait, as while all compute.

    1 unless all of its ranks share cores: devices of a rank compute at the same time, and ranks on other cores too.
    """
    shared = cluster.shared_cores
    if shared is None or shared.num_ranks < num_ranks * num_devices:
        return 1.0
    return max(1.0, min(shared.speedup, num_ranks))


def transfer(cluster: Cluster, num_ranks: int, num_devices: int) -> RankLink:
    """The link of a device to its peer on the next stage.

    The peer is `num_devices` further on. Stages are outermost: if the `num_ranks` stages do not lie in one block of a
    link level together, some neighbours are joined by the next level, which limits the pipeline. All devices are alike
    (`transfers`).

    >>> from autopar.costmodel.cluster.presets import PRESETS
    >>> level = PRESETS["h100"].levels[0]
    >>> transfer(PRESETS["h100"], 4, 2) == RankLink(level.latency_s, level.bandwidth_bytes_per_s)
    True
    """
    assert cluster.groups is None or num_ranks == 1, "neighbours of groups that differ have links that differ"
    reach, level = 1, cluster.levels[0]
    for level in cluster.levels:
        reach *= level.size or num_ranks * num_devices
        if reach >= num_ranks * num_devices:
            break
    return pair_link(level)


def pair_link(level: LinkLevel) -> RankLink:
    """The link of two devices that `level` joins."""
    rate = group_rate(level.group_rates, "p2p", 2)
    bytes_per_s = level.bandwidth_bytes_per_s * rate.bandwidth_share
    return RankLink(level.latency_s + rate.base_latency_s, bytes_per_s, rate.least_s)
