"""A lower bound of the step time from the work alone, for all strategies."""

from functools import cache

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import update_bytes, update_time
from autopar.costmodel.roofline import shapes_time
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh
from autopar.sbp.placement import I


def floor_s(graph: Graph, mesh: Mesh, cluster: Cluster, *, training: Training = WHOLE_BATCH) -> float:
    """Seconds of a step of `training` with every op and update split evenly over all devices of `mesh`, communication
    free.

    It is a lower bound: a device computes and moves at least its share of an op, and the roofline is monotone in both.
    """
    whole, best = (I,) * mesh.ndim, cluster.at_best()

    @cache
    def op_s(op: Op) -> float:
        return sum(shapes_time(op, tuple(v.shape for v in op.inputs), tuple(v.shape for v in op.outputs), best))

    updated = [update_bytes(item, whole, mesh.shape, training) for item in graph.inputs]
    ops_s = sum(op_s(op.nameless) for op in graph.ops)
    return (ops_s + update_time(sum(updated), sum(map(bool, updated)), cluster)) / mesh.num_devices
