"""The sequence dim of the residual stream, derived by following the batch and the hidden dim through the op rules."""

import math
from collections.abc import Mapping

from autopar.ir.graph import Graph, Input
from autopar.ir.inference.for_inference import tracked
from autopar.sbp.analysis.megatron_pairs import Structure, base_name
from autopar.sbp.op_signatures import signatures_of_call
from autopar.sbp.placement import Placement


def sequence_dims(graph: Graph, structure: Structure) -> dict[str, int]:
    """Value name -> its sequence dim, the one that is neither batch nor hidden, for 3-d values of the residual stream.

    The hidden dim is the last of the results of lookups, row products and unpaired products; column products begin a
    tensor-parallel region, which is no part of the stream. A model without such values (images as batch x channels x
    height x width, tokens without a batch) has no sequence dim; nor has a value of another size than the results of row
    products (patches before the class token is added).
    """
    hidden = follow_dims(graph, _hidden_starts(graph, structure))
    batch = follow_dims(graph, {item.value.name: 0 for item in batch_arguments(graph)})
    sizes = {math.prod(op.outputs[0].shape) for op in graph.ops if structure.kinds.get(op.name) == "row"}
    dims, is_tracked = {}, graph.once(tracked)
    for value in (value for op in graph.ops if op.name not in structure.region for value in op.outputs):
        rest = {0, 1, 2} - {hidden.get(value.name), batch.get(value.name)}
        if len(value.shape) == 3 and len(rest) == 1 and value.name in is_tracked and math.prod(value.shape) in sizes:
            dims[value.name] = rest.pop()
    return dims


def batch_arguments(graph: Graph) -> tuple[Input, ...]:
    """The arguments whose first dim is the batch: those with the most frequent size of it."""
    arguments = [item for item in graph.of_kind("argument") if item.value.shape]
    sizes = [item.value.shape[0] for item in arguments]
    return tuple(item for item in arguments if item.value.shape[0] == max(sizes, key=sizes.count))


def follow_dims(graph: Graph, starts: Mapping[str, int]) -> dict[str, int]:
    """Value name -> the dim along which it is split if the values of `starts` are split along their dims there.

    Values that are not split then are left out.
    """
    dims = dict(starts)
    for op in graph.ops:
        split = {slot: Placement("S", dims[value.name]) for slot, value in enumerate(op.inputs) if value.name in dims}
        fits = [
            candidate
            for candidate in signatures_of_call(op)
            if split and all(candidate.inputs[slot] == p for slot, p in split.items())
        ]
        signature = min(fits, key=lambda fit: fit.role != "", default=None)
        for value, placement in zip(op.outputs, signature.outputs if signature else ()):
            if placement.is_split:
                dims.setdefault(value.name, placement.dim)
    return dims


def _hidden_starts(graph: Graph, structure: Structure) -> dict[str, int]:
    starts = {}
    for op in graph.ops:
        if structure.kinds.get(op.name, "column") != "column" or base_name(op) == "embedding":
            starts[op.outputs[0].name] = 1 if base_name(op).startswith("conv") else len(op.outputs[0].shape) - 1
    return starts
