"""Batches of pairs on microbatches: `cat([chosen, rejected])` of two arguments, computed row by row, then cut apart.

A microbatch has its rows of both, one after the other: its part of the value is a share of each section (S(d|1x1)). An
op that computes a part of its result from parts of its inputs alone does so wherever these rows are in the whole.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from autopar.ir.graph import Op
from autopar.ir.op_facts import RESHAPES
from autopar.sbp.placement import Placement, S
from autopar.sbp.signature import Signature

_CAT, _SPLIT, _SLICE = "aten.cat.default", "aten.split_with_sizes.default", "aten.slice.Tensor"
_REPEAT = "aten.repeat.default"
Sections = tuple[int, ...]
_MOST_WAYS = 64  # in which the runs that are joined may be in sections


def in_sections(op: Op, plain: Sequence[Signature], present: Sequence[Sections]) -> Iterator[Signature]:
    """The signatures of `op` with dims in sections: those in which it joins some, reads those that are `present` and
    takes them apart; `plain`: its signatures without.
    """
    if op.target == _CAT and len(op.inputs) > 1:
        dim = op.args[1] if len(op.args) > 1 else 0
        if dim >= 0 and {len(value.shape) for value in op.inputs} == {len(op.outputs[0].shape)}:
            yield from _joined_runs(dim, [value.shape[dim] for value in op.inputs], present)
    if op.target in RESHAPES:
        yield from _joined(op)
    if op.target == _REPEAT:
        yield from _repeated(op, present)
    for sections in present:
        yield from _apart(op, sections)
        for signature in plain:
            placed = (*signature.inputs, *signature.outputs)
            if any(p.is_split for p in placed) and not any(p.sections or p.is_own or p.unit > 1 for p in placed):
                ends = [tuple(_of(p, sections) for p in side) for side in (signature.inputs, signature.outputs)]
                if _keeps_rows(op, signature, sections):
                    yield Signature(ends[0], ends[1], signature.role, signature.num_units)


def share_of_sections(placement: Placement) -> int:
    """The number by which the size of a split dim is to be divided before it is cut in microbatches."""
    return sum(placement.sections) or 1


def _of(placement: Placement, sections: Sections) -> Placement:
    return S(placement.dim, sections=sections) if placement.is_split else placement


def _keeps_rows(op: Op, signature: Signature, sections: Sections) -> bool:
    """Whether each section has whole rows of every dim that is split."""
    placed = zip((*signature.inputs, *signature.outputs), (*op.inputs, *op.outputs))
    extents = [value.shape[placement.dim] for placement, value in placed if placement.is_split]
    return all(extent % sum(sections) == 0 and extent > sum(sections) for extent in extents)


def _joined(op: Op) -> Iterator[Signature]:
    """The signatures in which `op` joins equal sections that lie along a dim before that of the rows."""
    shape = op.inputs[0].shape
    for dim, (number, size) in enumerate(itertools.pairwise(shape)):
        if number > 1 and op.outputs[0].shape == (*shape[:dim], number * size, *shape[dim + 2 :]):
            yield Signature((S(dim + 1),), (S(dim, sections=(1,) * number),))


def _joined_runs(dim: int, sizes: Sequence[int], present: Sequence[Sections]) -> Iterator[Signature]:
    """The signatures in which runs of `sizes`, each of which may be in sections, are joined along `dim`."""
    ways = [[(), *(one for one in present if size % sum(one) == 0)] for size in sizes]
    few = ways if math.prod(map(len, ways)) <= _MOST_WAYS else [[()] for _ in sizes]
    for way in itertools.product(*few):
        ends = [size * share // (sum(one) or 1) for size, one in zip(sizes, way) for share in one or (1,)]
        yield Signature(tuple(S(dim, sections=one) for one in way), (S(dim, sections=_lowest(ends)),))


def _repeated(op: Op, present: Sequence[Sections]) -> Iterator[Signature]:
    """The signatures in which all rows, which may be in sections, are there several times, one after the other."""
    (value,), (made,) = op.inputs, op.outputs
    added = len(made.shape) - len(value.shape)
    for dim, size in enumerate(value.shape):
        times = made.shape[dim + added] // size if size > 1 else 0
        for one in ((), *present) if times > 1 else ():
            yield Signature((S(dim, sections=one),), (S(dim + added, sections=_lowest((one or (1,)) * times)),))


def _apart(op: Op, sections: Sections) -> Iterator[Signature]:
    """The signatures in which `op` takes the sections apart."""
    if not op.inputs:
        return
    shape = op.inputs[0].shape
    if op.target == _SPLIT and len(op.args) == 3 and op.args[2] >= 0 and _lowest(op.args[1]) == sections:
        yield Signature((S(op.args[2], sections=sections),), (S(op.args[2]),) * len(op.outputs))
    elif op.target == _SLICE and len(op.args) == 4 and op.args[1] >= 0:
        dim, start, end = op.args[1:]
        bounds = [bound * shape[dim] // sum(sections) for bound in itertools.accumulate(sections, initial=0)]
        if shape[dim] % sum(sections) == 0 and (start, end) in itertools.pairwise(bounds):
            yield Signature((S(dim, sections=sections),), (S(dim),))
    elif op.target in RESHAPES and set(sections) == {1}:
        for dim, size in enumerate(shape):
            if op.outputs[0].shape == (*shape[:dim], len(sections), size // len(sections), *shape[dim + 1 :]):
                yield Signature((S(dim, sections=sections),), (S(dim + 1),))


def _lowest(sizes: Sequence[int]) -> Sections:
    common = math.gcd(*sizes)
    return tuple(size // common for size in sizes) if common else ()
