"""The links of p2p transfers between the stages of a pipeline."""

from autopar.costmodel.cluster.device_groups import ranks_of
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import group_rate


def transfers(cluster: Cluster, num_ranks: int, num_devices: int) -> tuple[tuple[float, float], ...]:
    """(latency in seconds, bytes/s of one direction) between a device of each rank of the pipeline and its peer on the
    next rank, of the last one on the first. Of `num_devices` a rank.

    On a cluster of groups of devices, neighbours within a group are joined as on a cluster of these alone, others by
    the link between groups.
    """
    if cluster.groups is None or num_ranks == 1:
        return (transfer(cluster, num_ranks, num_devices),) * num_ranks
    across, found = pair_rate(cluster.groups.link), []
    for ranks, (_, own) in zip(ranks_of(cluster, num_ranks), cluster.groups.members, strict=True):
        found += [transfer(own, len(ranks), num_devices)] * (len(ranks) - 1) + [across]
    return tuple(found)


def transfer(cluster: Cluster, num_ranks: int, num_devices: int) -> tuple[float, float]:
    """(latency in seconds, bytes/s of one direction) between a device and its peer on the next stage.

    The peer is `num_devices` further on. Stages are outermost: if the `num_ranks` stages do not lie in one block of a
    link level together, some neighbours are joined by the next level, which limits the pipeline. All devices are alike
    (`transfers`).

    >>> from autopar.costmodel.cluster.presets import PRESETS
    >>> level = PRESETS["h100"].levels[0]
    >>> transfer(PRESETS["h100"], 4, 2) == (level.latency_s, level.bandwidth_bytes_per_s)
    True
    """
    assert cluster.groups is None or num_ranks == 1, "neighbours of groups that differ have links that differ"
    reach, level = 1, cluster.levels[0]
    for level in cluster.levels:
        reach *= level.size or num_ranks * num_devices
        if reach >= num_ranks * num_devices:
            break
    return pair_rate(level)


def pair_rate(level: LinkLevel) -> tuple[float, float]:
    """(latency in seconds, bytes/s of one direction) between two devices that `level` joins."""
    rate = group_rate(level.group_rates, "p2p", 2)
    return level.latency_s + rate.base_latency_s, level.bandwidth_bytes_per_s * rate.bandwidth_share
