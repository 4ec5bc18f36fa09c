"""The predicted peak memory of a written plan."""

from autopar.costmodel.cluster.hardware import Cluster
from autopar.peak_memory.predict import rank_peaks
from autopar.plans.staged_plan import StagedPlan
from bench.fidelity.written_plans import Library, WrittenPlan, few_layers, on_cluster, staged, with_layers


def peak_bytes(written: WrittenPlan, cluster: Cluster, library: Library) -> float:
    """Bytes of the device that needs most as `library` runs the plan; linear in the number of layers, as `step_s`."""
    if not written.num_layers:
        plan = on_cluster(staged(written), cluster)
        more = (_more_buffers(plan, rank, library) for rank in range(plan.schedule.num_ranks))
        return max(peak + extra for peak, extra in zip(rank_peaks(plan), more))
    few = few_layers(written)
    low, high = (peak_bytes(with_layers(written, n), cluster, library) for n in (few, 2 * few))
    return low + (written.num_layers - few) / few * (high - low)


def _more_buffers(plan: StagedPlan, rank: int, library: Library) -> float:
    """Bytes of the buffers for saved values that `library` has on a rank beyond those of microbatches in flight."""
    num_stages = plan.schedule.num_stages
    if not library.buffers_by_stages or rank == num_stages - 1:
        return 0.0
    stage = plan.stages[rank]
    in_flight = stage.training.num_in_flight
    received = sum(plan.sent_bytes(rank - 1)) if rank else 0
    saved = stage.costs.memory_bytes["activations"] / in_flight + received
    return max(0, library.buffers_by_stages * num_stages - in_flight) * saved
