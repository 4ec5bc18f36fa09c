"""Lower bounds of the step time, from the work alone, and of the memory, from what is saved, for all strategies."""

from functools import cache
from itertools import product

import numpy as np

from autopar.costmodel.activations.autograd_footprint import footprints
from autopar.costmodel.cluster.hardware import Cluster, DeviceGroups
from autopar.costmodel.memory import update_bytes, update_time
from autopar.costmodel.roofline import shapes_time
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh, SeenShares
from autopar.sbp.local_ops import local_op
from autopar.sbp.placement import I


def floor_s(graph: Graph, mesh: Mesh, cluster: Cluster, *, training: Training = WHOLE_BATCH) -> float:
    """Seconds of a step of `training` with every op and update split evenly over all devices of `mesh`, communication
    free.

    It is a lower bound: a device computes and moves at least its share of an op, and the roofline is monotone in both.
    A rank that sees fewer rows of the batch than others has that share of an op that is split by rows.
    """
    return _least_share(mesh) * sum(work_s(graph, cluster, training))


def _least_share(mesh: Mesh) -> float:
    share = 1 / mesh.num_devices
    for axis, rows in mesh.shares:
        if isinstance(rows, SeenShares):
            share = min(share, rows[rows.seen] / sum(rows) * mesh.shape[axis] / mesh.num_devices)
    return share


def least_saved_bytes(graph: Graph, mesh: Mesh) -> float:
    """`floor_bytes` of a rank that may see fewer rows of the batch than others."""
    return _least_share(mesh) * graph.once(_floor_bytes)


def floor_bytes(graph: Graph, num_devices: int) -> float:
    """Bytes of activations that a device of `num_devices` has to save at least where nothing is recomputed, nothing
    offloaded and nothing done in microbatches.

    Each saved tensor is somewhere: on average a device has its share. Ops that have local implementations are left out,
    since those may save others. Views of one tensor count once, by the largest of those that are saved.
    """
    return graph.once(_floor_bytes) / num_devices


def _floor_bytes(graph: Graph) -> float:
    root = {item.value.name: item.value.name for item in graph.inputs}
    num_bytes = {item.value.name: 0.0 for item in graph.inputs}  # not saved by an op
    saved: dict[str, float] = {}
    internal_bytes = 0.0
    footprint_of = footprints(graph, fold(graph).representative)
    for op in graph.ops:
        found = footprint_of[op.name]
        for value, source in zip(op.outputs, found.alias_of):
            root[value.name] = value.name if source < 0 else root[op.inputs[source].name]
            num_bytes.setdefault(root[value.name], value.num_bytes)
        if local_op(op.target) is not None:
            continue
        internal_bytes += found.internal_bytes
        kept = [op.inputs[slot] for slot in found.saved_inputs] + [op.outputs[slot] for slot in found.saved_outputs]
        for value in kept:
            name = root[value.name]
            saved[name] = max(saved.get(name, 0.0), min(value.num_bytes, num_bytes[name]))
    return sum(saved.values()) + internal_bytes


def work_s(graph: Graph, cluster: Cluster, training: Training = WHOLE_BATCH) -> tuple[float, ...]:
    """The least seconds of each op of `graph` as a whole, and last those of the update, on one device; no parts of an
    op take less together.
    """
    best = cluster.at_best()

    @cache
    def op_s(op: Op) -> float:
        return sum(shapes_time(op, tuple(v.shape for v in op.inputs), tuple(v.shape for v in op.outputs), best))

    updated = (update_bytes(item, (I,), (1,), training) for item in graph.inputs)
    update_s = sum(update_time(num_bytes, best) for num_bytes in updated if num_bytes)
    return (*(op_s(op.nameless) for op in graph.ops), update_s)


def speeds_floor_s(graph: Graph, groups: DeviceGroups, training: Training = WHOLE_BATCH) -> float:
    """Seconds that no plan takes less than on all devices of `groups`, or on some of them: the sum of their speeds.

    Whatever part of each op each device has, the work of an op is done once at least: a linear program over the parts
    of each op that each group has, of which the dual is solved. With prices y of a group's seconds, all devices' sum
    1, the least T is at least the sum over ops of the least y * work of any group; each y gives a bound.
    """
    counts = [count for count, _ in groups.members]
    work = np.array([work_s(graph, one, training) for _, one in groups.members])  # [groups, ops]

    def bound_s(prices: np.ndarray) -> float:
        return float((prices[:, None] * work).min(axis=0).sum() / (prices @ counts))

    whole_s = work.sum(axis=1)
    prices = 1 / np.maximum(whole_s, 1e-30)  # exact where all ops are equally much faster on one group than on another
    best_s = bound_s(prices)
    for step in (1.5, 1.2, 1.05, 1.01, 1.002):
        is_better = True
        while is_better:
            is_better = False
            for group, factor in product(range(len(counts)), (step, 1 / step)):
                tried = prices.copy()
                tried[group] *= factor
                if (found_s := bound_s(tried)) > best_s * (1 + 1e-9):
                    prices, best_s, is_better = tried, found_s, True
    return best_s
