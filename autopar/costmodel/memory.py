"""Memory of a device: stored tensors of training, and tensors that autograd saves."""

import math
from functools import lru_cache

from autopar.costmodel.activations.autograd_footprint import footprint, saved_by_local_op
from autopar.costmodel.cluster.device_groups import cluster_of_rank
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.measured_terms import memory_share
from autopar.costmodel.roofline import internal_bytes, weight_share
from autopar.costmodel.training import Training
from autopar.ir.graph import Input, Op
from autopar.ir.op_facts import Shapes
from autopar.sbp.placement import I, Layout, local_shape
from autopar.sbp.signature import Strategy

# The share of a device's memory that is kept free for memory outside tensors: the driver's context, buffers of
# collectives, workspaces, fragmentation of the allocator. `peak_memory.predict` counts transients. A round number, not
# measured.
SPARE_MEMORY = 0.1


def usable_memory_bytes(cluster: Cluster) -> float:
    """The bytes of one device that a plan may use."""
    return cluster.memory_bytes * (1 - SPARE_MEMORY)


def rank_limits(limit_bytes: float, cluster: Cluster, num_ranks: int) -> tuple[float, ...]:
    """The bytes that a plan may use of a device of each rank of the pipeline: `limit_bytes`, but on a cluster of groups
    no more than the rank's own devices have.
    """
    if cluster.groups is None or num_ranks == 1:
        return (limit_bytes,) * num_ranks
    own = (cluster_of_rank(cluster, rank, num_ranks) for rank in range(num_ranks))
    return tuple(min(limit_bytes, usable_memory_bytes(one)) for one in own)


def local_bytes(shape: tuple[int, ...], itemsize: int, layout: Layout, mesh_shape: tuple[int, ...]) -> int:
    """Bytes of one rank's part of a tensor of global `shape`."""
    return math.prod(local_shape(shape, layout, mesh_shape)) * itemsize


def input_bytes(item: Input, layout: Layout, mesh_shape: tuple[int, ...], training: Training) -> dict[str, int]:
    """Bytes by kind ("parameters", "casts", "gradients", "optimizer", "buffers", "constants", "arguments") of an input
    stored in `layout`. "casts": of parameters, in the dtype in which they are computed, if it is another.

    An argument without gradient counts for the whole batch; one with a gradient is an activation received from another
    stage and counts for each microbatch in flight.
    """
    held = local_bytes(item.value.shape, item.value.stored_itemsize, layout, mesh_shape)
    by_kind = {item.kind + "s": held}
    if item.value.stored_dtype is not None:
        by_kind["casts"] = local_bytes(item.value.shape, item.value.dtype.itemsize, layout, mesh_shape)
    if item.kind == "argument":
        by_kind["arguments"] *= training.num_in_flight if item.value.needs_grad else training.num_microbatches
    if item.kind == "parameter" and item.value.needs_grad:
        by_kind["gradients"] = held
        itemsize = item.value.stored_itemsize
        by_kind["optimizer"] = held // itemsize * training.state_bytes(itemsize)
    return by_kind


def update_bytes(item: Input, layout: Layout, mesh_shape: tuple[int, ...], training: Training) -> int:
    """Bytes that the optimizer reads and writes on a device for an input stored in `layout`; 0 of what is not updated.

    A parameter and its state count twice, the gradient once. So do the casts of a parameter that is computed in another
    dtype: it is read and the cast written, the gradient of the cast is read and that of the parameter written.
    """
    by_kind = input_bytes(item, layout, mesh_shape, training)
    if "gradients" not in by_kind:
        return 0
    cast = by_kind["parameters"] + by_kind["gradients"] + 2 * by_kind["casts"] if "casts" in by_kind else 0
    return 2 * (by_kind["parameters"] + by_kind["optimizer"]) + by_kind["gradients"] + cast


def update_time(num_bytes: float, cluster: Cluster) -> float:
    """Seconds of the optimizer's update of a parameter that moves `num_bytes` (`update_bytes`)."""
    update_s = num_bytes / cluster.memory_bandwidth_bytes_per_s
    if cluster.memory_shares:
        update_s /= memory_share(cluster.memory_shares, "update", num_bytes=num_bytes).forward
    return update_s + cluster.update_s


# New tensors of AdamW's step of one parameter after the other, which is torch's on CPUs: the root of the second moment,
# and that over its correction.
_UPDATE_TEMPORARIES = 2


def input_update_s(
    item: Input, layout: Layout, mesh_shape: tuple[int, ...], training: Training, cluster: Cluster
) -> float:
    """Seconds of the optimizer's update of an input stored in `layout`; 0 of what is not updated."""
    moved = update_bytes(item, layout, mesh_shape, training)
    if not moved:
        return 0.0
    held = local_bytes(item.value.shape, item.value.stored_itemsize, layout, mesh_shape)
    temporaries = _UPDATE_TEMPORARIES * training.optimizer.startswith("adam")
    return update_time(moved, cluster) + temporaries * cluster.fresh_s(held)


@lru_cache(maxsize=2**16)
def memory_layout(layout: Layout) -> Layout:
    """`layout` with I for R, which have the same memory."""
    return tuple(I if placement.kind == "R" else placement for placement in layout)


def waiting_bytes(op: Op, outputs: Shapes) -> int:
    """Bytes of an output's gradient that is kept until the weight's gradient is computed, on local shapes.

    0 for ops that are no layers.
    """
    return math.prod(outputs[0]) * op.outputs[0].dtype.itemsize if weight_share(op) else 0


def saved_by_op(op: Op, strategy: Strategy, inputs: Shapes, outputs: Shapes, mesh_shape: tuple[int, ...]) -> int:
    """Bytes of results and internal tensors that `op` saves for backward, on the local shapes of `strategy`."""
    has_role = any(signature.role for signature in strategy.signatures)
    if has_role and (saved := saved_by_local_op(op, strategy, mesh_shape)) is not None:
        return saved
    kept = sum(
        math.prod(outputs[index]) * op.outputs[index].dtype.itemsize for index in sorted(footprint(op).saved_outputs)
    )
    return kept + internal_bytes(op, inputs)
