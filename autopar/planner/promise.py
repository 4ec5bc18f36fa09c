"""A rough estimate of the step of each point of the sweep, by which the most promising are tried first.

It only gives an order: every point is priced in full.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.collective_time import collective_times
from autopar.costmodel.training import Training
from autopar.costmodel.work_bound import floor_s
from autopar.ir.graph import Graph
from autopar.mesh import Mesh

# The collectives over a block's boundary tensor that Megatron's tensor parallelism issues in forward and backward.
_COLLECTIVES_A_BLOCK = 4


def rough_step_s(
    graph: Graph, starts: Sequence[int], cluster: Cluster, training: Training
) -> Callable[[int, Mesh, int], float]:
    """The function from (ranks of the pipeline, sub-mesh, number of microbatches) to rough seconds of a step.

    It adds the evenly shared work times the bubble of 1F1B, one reduction of the gradients over the data axes, and the
    collectives of tensor parallelism on the axis called "tp" over boundary tensors, as if all blocks were equal.
    `starts`: positions of the blocks' first ops in `graph`.
    """
    work_s = floor_s(graph, Mesh((1,), ("one",)), cluster, training=training)
    gradient_bytes = sum(item.value.num_bytes for item in graph.of_kind("parameter"))
    boundaries = [graph.ops[start - 1].outputs[0].num_bytes for start in starts[1:]]
    boundary_bytes = sum(boundaries) / max(1, len(boundaries))

    def estimate(num_ranks: int, mesh: Mesh, num: int) -> float:
        tensor = tuple(axis for axis, name in enumerate(mesh.axis_names) if name == "tp")
        data = tuple(axis for axis in range(mesh.ndim) if axis not in tensor)
        degree, replicas = (math.prod(mesh.shape[axis] for axis in axes) for axes in (tensor, data))

        def reduce_s(axes: tuple[int, ...], num_bytes: float) -> float:
            return (
                float(collective_times(cluster, mesh.shape, axes, "all_reduce", np.float64(num_bytes))) if axes else 0.0
            )

        gradients_s = reduce_s(data, gradient_bytes / (num_ranks * degree))
        block_s = num * _COLLECTIVES_A_BLOCK * reduce_s(tensor, boundary_bytes / (num * replicas))
        busy_s = work_s / (num_ranks * mesh.num_devices) + block_s * len(starts) / num_ranks
        return busy_s * (1 + (num_ranks - 1) / num) + gradients_s

    return estimate
