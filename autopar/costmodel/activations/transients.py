"""The largest transient of a step: memory that exists only while one op runs, less counted memory that does not exist
then.

The estimate counts all gradients and all saved activations. While the backward of an op runs (for a loss over a large
vocabulary it has several copies of the float32 logits), the gradients of all parameters that are read up to that op do
not exist yet, and the activations saved by later ops are freed. The transient is that of the op for which the sum is
largest, with all tensors split equally.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from autopar.costmodel.activations.autograd_footprint import spec
from autopar.costmodel.activations.count_storages import count_storages
from autopar.costmodel.activations.saved_activations import Regions, region_of_ops
from autopar.ir.gradients.observed_footprint import Footprint, Spec, fill
from autopar.ir.graph import Graph, Op, Value, resolve
from autopar.ir.op_facts import ATTENTION, Shapes, family
from autopar.sbp.analysis.sampled_graph import Sampled
from autopar.torch_compat import pytree

# An upper bound of an op's transient in units of its operands; an op whose operands are too small for the largest is
# not measured.
_MOST = 6


@dataclass(frozen=True)
class Transient:
    """The largest transient; empty if the estimate is larger without it.

    `ops`: name of the op -> the part of its transient that counts, beyond the activations saved by later ops.
    `pending`: names of the parameters whose gradients do not exist yet.
    """

    ops: Mapping[str, float]
    pending: frozenset[str]


def largest_transient(
    sampled: Sampled, known: Mapping[str, Footprint], regions: Regions, offloaded: Regions, num_microbatches: int
) -> Transient:
    """The largest transient of the sampled graph, by global shapes; `known`: op name -> footprint.

    `regions` are recomputed, `offloaded` ones wait on the host.

    With several microbatches the gradients of earlier ones exist, so that none is pending. A graph without ops has no
    transient, nor has a stage without a loss: the sweep that cuts stages adds up blocks and does not know the largest
    of each.
    """
    graph = sampled.graph
    if not graph.ops or not any(
        isinstance(value, Value) and value.needs_grad and math.prod(value.shape) == 1 for value in graph.outputs
    ):
        return Transient({}, frozenset())
    saved = _saved_behind(sampled, known, regions, offloaded)
    last = _last_readers(graph) if num_microbatches == 1 else {}
    to_come = list(accumulate(_by_position(sampled, last)))
    parameters = frozenset(item.value.name for item in graph.of_kind("parameter"))
    best, largest = 0, Transient({}, frozenset())
    for position in range(len(graph.ops) - 1, -1, -1):
        op, counted = graph.ops[position], saved[position] + to_come[position]
        if known[op.name].is_view or _MOST * _operand_bytes(op) - counted <= best:
            continue
        size = _transient(op, parameters)
        if size - counted > best:
            pending = frozenset(name for name, reader in last.items() if reader <= position)
            best, largest = size - counted, Transient({op.name: 1 - saved[position] / size}, pending)
    return largest


def transient_bytes(op: Op, inputs: Shapes, outputs: Shapes, parameters: frozenset[str]) -> float:
    """Bytes of the transient of `op` on local shapes: it is split like the largest of its inputs and outputs."""
    sizes = [value.num_bytes for value in (*op.inputs, *op.outputs)]
    largest = sizes.index(max(sizes))
    whole = math.prod((*op.inputs, *op.outputs)[largest].shape)
    return _transient(op, parameters) * math.prod((*inputs, *outputs)[largest]) / max(whole, 1)


def _operand_bytes(op: Op) -> int:
    return sum(value.num_bytes for value in (*op.inputs, *op.outputs))


def _saved_behind(
    sampled: Sampled, known: Mapping[str, Footprint], regions: Regions, offloaded: Regions
) -> Sequence[int]:
    """For each op, the counted bytes that later ops save of their own results."""
    apart = region_of_ops(regions).keys() | region_of_ops(offloaded).keys()
    own = [
        (
            sampled.num(op.name)
            * (sum(op.outputs[i].num_bytes for i in known[op.name].saved_outputs) + known[op.name].internal_bytes)
            if op.name not in apart
            else 0
        )
        for op in sampled.graph.ops
    ]
    total = sum(own)
    return [total - through for through in accumulate(own)]


def _last_readers(graph: Graph) -> dict[str, int]:
    """Name of each trained parameter -> position of its last reader, from whose backward on its gradient exists."""
    number, uses = {op.name: position for position, op in enumerate(graph.ops)}, graph.uses
    names = [item.value.name for item in graph.of_kind("parameter") if item.value.needs_grad]
    return {name: max((number.get(use.user, 0) for use in uses.get(name, ())), default=0) for name in names}


def _by_position(sampled: Sampled, last: Mapping[str, int]) -> list[int]:
    """For each op, bytes of the parameters whose last reader it is."""
    sizes = [0] * len(sampled.graph.ops)
    for item in sampled.graph.of_kind("parameter"):
        if item.value.name in last:
            sizes[last[item.value.name]] += sampled.num(item.value.name) * item.value.stored_bytes
    return sizes


def _transient(op: Op, parameters: frozenset[str]) -> int:
    """Bytes of the transient of `op` on global shapes."""
    is_tracked = not op.is_no_grad and any(value.needs_grad for value in op.outputs)
    inputs = tuple(
        (value.shape, value.dtype, is_tracked and value.needs_grad and value.name not in parameters)
        for value in op.inputs
    )
    return _measured(op.target, op.args, op.kwargs, inputs, tuple(map(spec, op.outputs)))


@lru_cache(maxsize=2**16)
def _measured(target: str, args: Any, kwargs: Any, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...]) -> int:
    """The larger of the transients of forward and of backward, which include all gradients of the op."""
    if family(target) == ATTENTION:  # fused; on the meta device the unfused kernel would run
        return sum(_num_bytes(one) for one in (*inputs, *outputs) if one[2])
    try:
        return _run(target, args, kwargs, inputs)
    except (RuntimeError, NotImplementedError):
        return 0  # the op depends on contents


def _num_bytes(one: Spec) -> int:
    return math.prod(one[0]) * one[1].itemsize


def _run(target: str, args: Any, kwargs: Any, inputs: tuple[Spec, ...]) -> int:
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs) for shape, dtype, needs in inputs]
    with torch.enable_grad(), count_storages(tensors) as storages:
        results = resolve(target)(*fill(args, tensors), **{name: fill(value, tensors) for name, value in kwargs})
        results = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
        forward, start = storages.peak_bytes - storages.num_bytes, storages.num_bytes
        tracked, wanted = [x for x in results if x.requires_grad], [x for x in tensors if x.requires_grad]
        if not tracked or not wanted:
            return forward
        storages.restart()
        torch.autograd.grad(tracked, wanted, [torch.empty_like(x) for x in tracked], allow_unused=True)
        return max(forward, storages.peak_bytes - start)
