"""Run the graph of a microbatch for every microbatch of a batch."""

import torch

from autopar.ir.graph import Value
from autopar.ir.interpret import run_constants
from autopar.ir.run_graph import run
from autopar.sbp.placement import P


def slice_of(tensor, placement, count, index):
    if not placement.is_split:
        return tensor
    units = tensor.shape[placement.dim] // (sum(placement.sections) or 1)
    sections = tensor.split([units * size for size in placement.sections or (1,)], placement.dim)
    return torch.cat([one.chunk(count, placement.dim)[index] for one in sections], placement.dim)


def step(micro, inputs):
    """Outputs of all microbatches put together, after a backward of each from the sum of what it gives of the loss."""
    graph, count = micro.graph, micro.num_microbatches
    whole = run_constants(graph, "cpu") | inputs
    for item in micro.counts:
        (whole[item.input.value.name],), _ = run(
            item.graph, {v.value.name: whole[v.value.name] for v in item.graph.inputs}
        )
    parts = []
    for index in range(count):
        own = {
            item.value.name: slice_of(whole[item.value.name], micro.placements[item.value.name], count, index)
            for item in graph.inputs
        }
        for item in graph.inputs:
            assert tuple(own[item.value.name].shape) == item.value.shape, item.fqn
        outputs, _ = run(graph, own)
        losses = [x for x in outputs if isinstance(x, torch.Tensor) and x.ndim == 0 and x.requires_grad]
        if losses:
            sum(losses).backward()
        parts.append([x.detach() if isinstance(x, torch.Tensor) else x for x in outputs])
    return [_joined(micro, value, [part[i] for part in parts]) for i, value in enumerate(graph.outputs)]


def _joined(micro, value, parts):
    if not isinstance(value, Value):
        return parts[0]
    placement = micro.placements[value.name]
    if placement == P:
        return sum(parts)
    if placement.is_split:
        return torch.cat(parts, placement.dim)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]
