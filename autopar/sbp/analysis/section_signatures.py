"""Fused projections: products by a parameter whose columns are cut in sections, as queries, keys and values are.

A part of all columns is no part of each section. But columns do not see each other in a product, nor in what is
computed element by element up to the cut, so their order does not matter there: each rank may compute its share of
every section, S(d|3x1), and the cut gives it its part of each. The parameter and its bias are converted to that split
where they are read. Stored they are as DTensors are, whole or in runs of one dim.

Dims are followed from the products on, in graph order; then sections from the cuts back.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Op, Value, arguments_of
from autopar.ir.op_facts import PERMUTATIONS, RESHAPES
from autopar.sbp.analysis.megatron_pairs import product_slots, values_from_parameters
from autopar.sbp.op_signatures import signatures_of_call
from autopar.sbp.placement import Placement, S
from autopar.sbp.rules import cast, pointwise
from autopar.sbp.rules.view import dim_groups
from autopar.sbp.signature import Signature

Sections = tuple[int, ...]  # sizes in lowest terms
Dims = dict[str, int]  # value -> the dim that consists of a product's columns
Bounds = defaultdict[str, set[int]]  # value -> indices of that dim between which it is cut

# Ops whose results along a dim depend on the same index of their operands alone, whatever the index is.
_PASSING = frozenset((*pointwise.RULES, *cast.RULES, *PERMUTATIONS, *RESHAPES, "aten.dropout.default"))
_SPLIT, _SLICE, _SELECT, _UNBIND = (
    "aten.split_with_sizes.default",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.unbind.int",
)
_MOST_SECTIONS = 16


def section_signatures(graph: Graph) -> dict[str, tuple[Signature, ...]]:
    """Name of each op from a product by a parameter to where its columns are cut -> its signatures in sections."""
    if not any(op.target in (_SPLIT, _SLICE, _SELECT, _UNBIND) for op in graph.ops):
        return {}
    from_parameters = values_from_parameters(graph)
    dims = _columns(graph, from_parameters)
    bounds = _bounds(graph, dims)
    if not any(bounds.values()):
        return {}
    found = {op.name: tuple(_signatures(op, dims, bounds, from_parameters)) for op in graph.ops}
    return {name: signatures for name, signatures in found.items() if signatures}


def _columns(graph: Graph, from_parameters: frozenset[str]) -> Dims:
    dims: Dims = {}
    known: dict[Any, int] = {}  # of equal calls on such values
    for op in graph.ops:
        is_product = product_slots(op, from_parameters) is not None
        if not is_product and dims.keys().isdisjoint([value.name for value in op.inputs]):
            continue
        read = [(dims.get(value.name, -1), value.name in from_parameters) for value in op.inputs]
        key = id(op.nameless), *read
        if key not in known:
            known[key] = _column_dim(op, dims, from_parameters)
        if known[key] >= 0:
            dims.update([(value.name, known[key]) for value in op.outputs])
    return dims


def _column_dim(op: Op, dims: Dims, from_parameters: frozenset[str]) -> int:
    """The dim of the outputs of an op that consists of a product's columns, else -1."""
    if product_slots(op, from_parameters) is not None:
        last = len(op.outputs[0].shape) - 1
        return last if _splits_of(op, last, from_parameters) else -1
    if _cut_dim(op) == dims.get(op.inputs[0].name, -1):
        return _cut_dim(op)
    return _passed_dim(op, dims, from_parameters) if op.target in _PASSING else -1


def _splits_of(op: Op, dim: int, from_parameters: frozenset[str]) -> list[Signature]:
    """The signatures of `op` that split its output along `dim`; of a product that of its parameter, not of rows."""
    slots = product_slots(op, from_parameters)
    found = [one for one in signatures_of_call(op) if one.outputs[0] == S(dim) and not one.role]
    return found if slots is None else [one for one in found if one.inputs[slots[1]].is_split]


def _cut_dim(op: Op) -> int:
    """The dim that a canonical op cuts in runs of indices, else -2."""
    if op.target not in (_SPLIT, _SLICE) or op.kwargs or len(op.args) != (3 if op.target == _SPLIT else 4):
        return -2
    dim, *bounds = op.args[2:] if op.target == _SPLIT else op.args[1:]
    is_canonical = all(isinstance(bound, int) and 0 <= bound <= op.inputs[0].shape[dim] for bound in bounds)
    return dim if dim >= 0 and is_canonical else -2


def _passed_dim(op: Op, dims: Mapping[str, int], from_parameters: frozenset[str]) -> int:
    """The dim of the output that consists of the columns of all inputs but parameters, else -1."""
    activations = [slot for slot, value in enumerate(op.inputs) if value.name not in from_parameters]
    if len(op.outputs) != 1:
        return -1
    for signature in signatures_of_call(op):
        split = [slot for slot in activations if signature.inputs[slot].is_split]
        if signature.role or not signature.outputs[0].is_split or not split:
            continue
        if all(dims.get(op.inputs[slot].name, -1) == signature.inputs[slot].dim for slot in split):
            return signature.outputs[0].dim
    return -1


def _bounds(graph: Graph, dims: Dims) -> Bounds:
    bounds: Bounds = defaultdict(set)
    for op in reversed(graph.ops):
        for value in op.inputs:
            if value.name in dims:
                bounds[value.name] |= _bounds_before(op, value, dims, bounds)
    return bounds


def _bounds_before(op: Op, value: Value, dims: Dims, bounds: Bounds) -> set[int]:
    """The indices between which `op` cuts the columns of its input `value`, or what reads its outputs does."""
    dim = dims[value.name]
    if op.target in (_SELECT, _UNBIND) and arguments_of(op)["dim"] == dim:
        return {op.args[2], op.args[2] + 1} if op.target == _SELECT else set(range(value.shape[dim]))
    if _cut_dim(op) == dim:
        starts = (op.args[2],) if op.target == _SLICE else itertools.accumulate(op.args[1][:-1], initial=0)
        runs = [(start, out) for start, out in zip(starts, op.outputs, strict=True)]
        return {start + end for start, out in runs for end in (0, out.shape[dim], *bounds[out.name])}
    out = op.outputs[0]
    if op.target not in _PASSING or out.name not in dims:
        return set()
    own, after = value.shape[dim], out.shape[dims[out.name]]
    return {bound * own // after for bound in bounds[out.name] if bound * own % after == 0}


def _sections(value: Value, dims: Dims, bounds: Bounds) -> Sections:
    """The sections that `value` is cut in; () if it is not."""
    if not bounds.get(value.name):
        return ()
    return _between({0, *bounds[value.name], value.shape[dims[value.name]]})


def _between(bounds: Iterable[int]) -> Sections:
    sizes = [end - start for start, end in itertools.pairwise(sorted(bounds))]
    unit = math.gcd(*sizes)
    return tuple(size // unit for size in sizes) if 1 < len(sizes) <= _MOST_SECTIONS else ()


def _signatures(op: Op, dims: Dims, bounds: Bounds, from_parameters: frozenset[str]) -> Iterable[Signature]:
    source, out = (op.inputs or op.outputs)[0], op.outputs[0]
    if source.name in dims and _cut_dim(op) == dims[source.name]:
        if sections := _sections(source, dims, bounds):
            yield _of_cut(op, sections, bounds)
        return
    sections = _sections(out, dims, bounds) if out.name in dims else ()
    if not sections:
        return
    dim = dims[out.name]
    if out.shape[dim] > sum(sections):
        yield from (_placed(one, sections) for one in _splits_of(op, dim, from_parameters))
    elif op.target in RESHAPES and set(sections) == {1}:  # each section is an index of its own: split what is behind it
        groups = dim_groups(source.shape, out.shape)
        inner = [(ins, outs[1]) for ins, outs in groups if len(ins) == 1 and outs[0] == dim and len(outs) > 1]
        yield from (Signature((S(ins[0], sections=sections),), (S(after),)) for ins, after in inner)


def _placed(signature: Signature, sections: Sections) -> Signature:
    """`signature`, which splits dims of one meaning, in sections."""

    def of_side(side: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(replace(one, sections=sections) if one.is_split else one for one in side)

    return replace(signature, inputs=of_side(signature.inputs), outputs=of_side(signature.outputs))


def _of_cut(op: Op, sections: Sections, bounds: Bounds) -> Signature:
    """The signature of a cut of a dim in sections: an output of several sections is split in these."""
    dim = _cut_dim(op)
    ends = [*itertools.accumulate(sections, initial=0)]
    unit = op.inputs[0].shape[dim] // ends[-1]
    starts = (op.args[2],) if op.target == _SLICE else itertools.accumulate(op.args[1][:-1], initial=0)
    outputs = []
    for start, out in zip(starts, op.outputs, strict=True):
        inside = _between(end for end in ends if start <= end * unit <= start + out.shape[dim])
        outputs.append(S(dim, sections=inside))
    return Signature((S(dim, sections=sections),), tuple(outputs))
