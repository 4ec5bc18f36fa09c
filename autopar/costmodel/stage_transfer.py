"""The links of p2p transfers between the stages of a pipeline."""

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import group_rate


def transfer(cluster: Cluster, num_ranks: int, num_devices: int) -> tuple[float, float]:
    """(latency in seconds, bytes/s of one direction) between a device and its peer on the next stage.

    The peer is `num_devices` further on. Stages are outermost: if the `num_ranks` stages do not lie in one block of a
    link level together, some neighbours are joined by the next level, which limits the pipeline; as does the link
    between groups of devices.

    >>> from autopar.costmodel.cluster.presets import PRESETS
    >>> level = PRESETS["h100"].levels[0]
    >>> transfer(PRESETS["h100"], 4, 2) == (level.latency_s, level.bandwidth_bytes_per_s)
    True
    """
    if cluster.groups is not None:
        return pair_rate(cluster.groups.link)
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
