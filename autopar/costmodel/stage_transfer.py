"""Links between the stages of a pipeline."""

from autopar.costmodel.cluster.hardware import Cluster


def transfer(cluster: Cluster, num_ranks: int, num_devices: int) -> tuple[float, float]:
    """(seconds, bytes/s of one direction) between a device and its like on the next stage, `num_devices` further on.

    Stages are outermost: as soon as the `num_ranks` of them do not lie in one block of a link level together, some
    neighbours are joined by the next, and the pipeline runs at their pace.

    >>> from autopar.costmodel.cluster.presets import PRESETS
    >>> level = PRESETS["h100"].levels[0]
    >>> transfer(PRESETS["h100"], 4, 2) == (level.latency_s, level.bandwidth_bytes_per_s)
    True
    """
    reach, level = 1, cluster.levels[0]
    for level in cluster.levels:
        reach *= level.size or num_ranks * num_devices
        if reach >= num_ranks * num_devices:
            break
    return level.latency_s, level.bandwidth_bytes_per_s
