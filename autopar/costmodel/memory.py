"""Bytes per device: what is stored for training, and what backward needs from forward."""

import math
from collections.abc import Mapping
from functools import cache

from autopar.costmodel.hardware import Cluster
from autopar.costmodel.probe import footprint
from autopar.ir.graph import Graph, Input, Op
from autopar.sbp.assignment import uses_of
from autopar.sbp.placement import I, Layout, local_shape

# Bytes of state per element, held in float32 as mixed-precision training does.
OPTIMIZER_STATE_BYTES: Mapping[str, int] = {"none": 0, "sgd": 0, "momentum": 4, "adagrad": 4, "adam": 8, "adamw": 8}


# Kept free of a device's memory for what is not counted: the driver's context, buffers of the collectives, workspaces and what the
# allocator cannot use between blocks. A round number, not measured; one gradient bucket or workspace is small beside it.
SPARE_MEMORY = 0.1


def usable_memory_bytes(cluster: Cluster) -> float:
    """Bytes of one device that a plan may fill."""
    return cluster.memory_bytes * (1 - SPARE_MEMORY)


def optimizer_state_bytes(optimizer: str) -> int:
    """Bytes of optimizer state per parameter element; ValueError if `optimizer` is unknown."""
    if optimizer not in OPTIMIZER_STATE_BYTES:
        known = ", ".join(OPTIMIZER_STATE_BYTES)
        raise ValueError(f"optimizer: expected one of {known}, found {optimizer!r}; take the one with as much state")
    return OPTIMIZER_STATE_BYTES[optimizer]


def local_bytes(shape: tuple[int, ...], itemsize: int, layout: Layout, mesh_shape: tuple[int, ...]) -> int:
    """Bytes of one rank's part."""
    return math.prod(local_shape(shape, layout, mesh_shape)) * itemsize


def input_bytes(item: Input, layout: Layout, mesh_shape: tuple[int, ...], optimizer: str) -> dict[str, int]:
    """Bytes by kind ("parameters", "gradients", "optimizer", "buffers", "constants", "arguments") of an input stored in `layout`."""
    held = local_bytes(item.value.shape, item.value.dtype.itemsize, layout, mesh_shape)
    found = {item.kind + "s": held}
    if item.kind == "parameter" and item.value.needs_grad:
        found["gradients"] = held
        found["optimizer"] = held // item.value.dtype.itemsize * optimizer_state_bytes(optimizer)
    return found


def update_bytes(item: Input, layout: Layout, mesh_shape: tuple[int, ...], optimizer: str) -> int:
    """Bytes the optimizer reads and writes: parameter and state twice, gradient once."""
    found = input_bytes(item, layout, mesh_shape, optimizer)
    return 2 * (found["parameters"] + found["optimizer"]) + found["gradients"] if "gradients" in found else 0


@cache
def memory_layout(layout: Layout) -> Layout:
    """`layout` with its gradient forgotten."""
    return tuple(I if placement.kind == "R" else placement for placement in layout)


def internal_bytes(op: Op, inputs: tuple[tuple[int, ...], ...]) -> float:
    """Bytes backward needs besides inputs and outputs, when the op runs on local inputs of these shapes: split as its first input is."""
    whole = footprint(op).internal_bytes
    if not whole or not op.inputs:
        return float(whole)
    return whole * math.prod(inputs[0]) / max(math.prod(op.inputs[0].shape), 1)


def held_values(graph: Graph) -> frozenset[str]:
    """Values whose memory is there until backward even if none of their readers saves it: inputs, saved results, views of those and of what
    another reader saves."""
    held = {item.value.name for item in graph.inputs}
    uses, ops = uses_of(graph), {op.name: op for op in graph.ops}
    for op in graph.ops:
        found = footprint(op)
        for index, value in enumerate(op.outputs):
            base = op.inputs[found.alias_of[index]].name if found.alias_of[index] >= 0 else None
            if index in found.saved_outputs or base in held or (base and _is_saved(base, uses, ops)):
                held.add(value.name)
    return frozenset(held)


def _is_saved(name: str, uses: Mapping, ops: Mapping[str, Op]) -> bool:
    return any(use.user in ops and use.slot in footprint(ops[use.user]).saved_inputs for use in uses[name])
