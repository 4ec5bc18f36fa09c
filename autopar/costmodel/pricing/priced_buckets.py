"""`priced_buckets`: the buckets of parameters: the gradients of one are reduced while others are computed.

Of N bytes that are reduced in buckets of B bytes, at a + b * B seconds each, all but the last can be hidden; where
nothing is, N / B buckets take a each. The sum of what is exposed, b * B, and of the latencies, a * N / B, is least at
B = sqrt(a / b * N).
"""

import math
from collections.abc import Mapping

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.collective_time import collective_times
from autopar.costmodel.overlap.pass_time import has_overlap
from autopar.costmodel.training import Training
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.assignment import InBucket

# A bucket of so small a share of a device's memory hardly counts beside the rest of a step.
_SHARE_OF_MEMORY = 64
_LEAST_BYTES = 2**16
# With overlap, the share of its bytes below which a bucket takes one more parameter, whatever its size.
_LEAST_FILLED = 0.5


def priced_buckets(
    graph: Graph, folded: Folded, mesh: Mesh, cluster: Cluster, training: Training, memory_bytes: float
) -> Mapping[str, InBucket]:
    """Parameter -> its place in the bucket that may gather it or reduce its gradient.

    `memory_bytes`: of a device.
    """
    most = bucket_bytes(graph, mesh, cluster, memory_bytes)
    least = _LEAST_FILLED * most if cluster.overlap else 0.0
    return parameter_buckets(graph, folded, most, least=least, is_prefetched=has_overlap(cluster, training))


def bucket_bytes(graph: Graph, mesh: Mesh, cluster: Cluster, memory_bytes: float) -> float:
    """The most bytes of parameters in a bucket on a device with `memory_bytes`; without overlap as many as fit."""
    most = memory_bytes / _SHARE_OF_MEMORY
    num_bytes = sum(item.value.num_bytes for item in graph.of_kind("parameter") if item.value.needs_grad)
    if not cluster.overlap or not num_bytes or mesh.num_devices == 1:
        return most
    sizes, axes = np.array([0.0, num_bytes]), tuple(range(len(mesh.shape)))
    latency_s, whole_s = collective_times(cluster, mesh.shape, axes, "all_reduce", sizes).tolist()
    if whole_s <= latency_s:
        return most
    return min(most, max(_LEAST_BYTES, math.sqrt(latency_s / (whole_s - latency_s)) * num_bytes))
