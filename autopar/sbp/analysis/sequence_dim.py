"""Which dim of the residual stream holds the sequence: found by following the batch and the hidden dim through the
rules, by no name.
"""

import math
from collections.abc import Mapping

from autopar.ir.graph import Graph, Input
from autopar.sbp.analysis.megatron_pairs import Structure, base_name
from autopar.sbp.candidates import signatures_of_call
from autopar.sbp.placement import Placement


def sequence_dims(graph: Graph, structure: Structure) -> dict[str, int]:
    """Value -> its sequence dim, for values of the residual stream of three dims: the one that is neither batch nor
    hidden.

    The hidden dim is what lookups, row products and unpaired products make; column products begin a tensor-parallel
    region, which is not of the stream. A model without such values (images as batch x channels x height x width, tokens
    without a batch) has none; nor has what is not as large as what some row product makes (patches before the class
    token joins them).
    """
    hidden = follow_dims(graph, _hidden_starts(graph, structure))
    batch = follow_dims(graph, {item.value.name: 0 for item in batch_arguments(graph)})
    sizes = {math.prod(op.outputs[0].shape) for op in graph.ops if structure.kinds.get(op.name) == "row"}
    found = {}
    for value in (value for op in graph.ops if op.name not in structure.region for value in op.outputs):
        rest = {0, 1, 2} - {hidden.get(value.name), batch.get(value.name)}
        if len(value.shape) == 3 and len(rest) == 1 and value.needs_grad and math.prod(value.shape) in sizes:
            found[value.name] = rest.pop()
    return found


def batch_arguments(graph: Graph) -> tuple[Input, ...]:
    """The arguments whose first dim is the batch: as large as most of them have."""
    arguments = [item for item in graph.of_kind("argument") if item.value.shape]
    sizes = [item.value.shape[0] for item in arguments]
    return tuple(item for item in arguments if item.value.shape[0] == max(sizes, key=sizes.count))


def follow_dims(graph: Graph, starts: Mapping[str, int]) -> dict[str, int]:
    """Value -> the dim along which it is split once `starts` are split along theirs; where there is one."""
    found = dict(starts)
    for op in graph.ops:
        split = {slot: Placement("S", found[value.name]) for slot, value in enumerate(op.inputs) if value.name in found}
        fits = [
            found
            for found in signatures_of_call(op)
            if split and all(found.inputs[slot] == p for slot, p in split.items())
        ]
        signature = min(fits, key=lambda fit: fit.role != "", default=None)
        for value, placement in zip(op.outputs, signature.outputs if signature else ()):
            if placement.is_split:
                found.setdefault(value.name, placement.dim)
    return found


def _hidden_starts(graph: Graph, structure: Structure) -> dict[str, int]:
    starts = {}
    for op in graph.ops:
        if structure.kinds.get(op.name, "column") != "column" or base_name(op) == "embedding":
            starts[op.outputs[0].name] = 1 if base_name(op).startswith("conv") else len(op.outputs[0].shape) - 1
    return starts
