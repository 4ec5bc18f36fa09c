"""The predicted peak memory of a written plan."""

import math
from dataclasses import replace

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.roofline import local_shapes
from autopar.peak_memory.predict import rank_peaks
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from bench.fidelity.run_again import SELECTIVE, kept_results
from bench.fidelity.written_plans import Library, WrittenPlan, few_layers, on_cluster, staged, with_layers


def peak_bytes(written: WrittenPlan, cluster: Cluster, library: Library) -> float:
    """Bytes of the device that needs most as `library` runs the plan; linear in the number of layers, as `step_s`."""
    if not written.num_layers and written.recomputed in SELECTIVE:
        every = replace(written, recomputed="all")
        kept = (_kept_bytes(stage, written.recomputed) for stage in staged(every).stages)
        return peak_bytes(every, cluster, library) + max(kept)
    if not written.num_layers:
        plan = on_cluster(staged(written), cluster)
        more = (_more_buffers(plan, rank, library) for rank in range(plan.schedule.num_ranks))
        return max(peak + extra for peak, extra in zip(rank_peaks(plan), more))
    few = few_layers(written)
    low, high = (peak_bytes(with_layers(written, n), cluster, library) for n in (few, 2 * few))
    return low + (written.num_layers - few) / few * (high - low)


def _kept_bytes(stage: Plan, which: str) -> float:
    """Bytes of the results that blocks keep of the ops that do not run again, of all microbatches in flight."""
    kept, num_bytes = kept_results(stage, which), 0
    for op in stage.graph.ops:
        if op.name in kept:
            _, (shape, *_) = local_shapes(op, stage.assignment.strategies[op.name], stage.mesh.shape)
            num_bytes += math.prod(shape) * op.outputs[0].dtype.itemsize
    return stage.training.num_in_flight * num_bytes


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
