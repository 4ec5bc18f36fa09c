"""The predicted peak memory of a written plan."""

from autopar.costmodel.cluster.hardware import Cluster
from autopar.peak_memory.predict import rank_peaks
from bench.fidelity.written_plans import WrittenPlan, few_layers, on_cluster, staged, with_layers


def peak_bytes(written: WrittenPlan, cluster: Cluster) -> float:
    """Bytes of the device that needs most; linear in the number of layers, as `step_s`."""
    if not written.num_layers:
        return max(rank_peaks(on_cluster(staged(written), cluster)))
    few = few_layers(written)
    low, high = (peak_bytes(with_layers(written, n), cluster) for n in (few, 2 * few))
    return low + (written.num_layers - few) / few * (high - low)
