"""Which dims are offered in parts of unequal sizes, by their size, and in what units.

Whatever an axis divides is split evenly, as ever. Parts of unequal sizes are offered of the batch and of the dims of
large parameters, if some axis does not divide them, and of the heads that such a dim is made of, so that few models and
meshes have more to search. A reshape carries them on: the rows of a batch of 10 become the tokens of 10 x 1024 in units
of 1024, and 25 heads the 25 x 64 features of a layer in units of 64.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op
from autopar.ir.op_facts import RESHAPES
from autopar.mesh import Mesh
from autopar.sbp.op_signatures import extents_of, signatures_of
from autopar.sbp.rules.given import per_rules

Uneven = tuple[tuple[int, tuple[int, ...]], ...]  # size of a dim -> units of its parts


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The batch in shares on mesh axis `axis`: its ranks' `sizes`, in rows, and the `extents` that are split so."""

    axis: int
    sizes: tuple[int, ...]
    extents: Uneven

    def has(self, extent: int) -> bool:
        """Whether a dim of this size is split in shares only."""
        return any(extent == one for one, _ in self.extents)


LARGE_SHARE = 0.01  # of the model's elements, of a parameter whose dims are offered
# Ops whose split dims may have different sizes, in parts that are in proportion: a part of the slowest of the dims that
# a reshape joins is a run of whole rows of the others, and repeated entries follow their own.
PROPORTIONAL = RESHAPES | {"aten.repeat_interleave.self_int", "aten.scaled_dot_product_attention.default"}


def uneven_extents(graph: Graph, ops: Sequence[Op], mesh_shape: tuple[int, ...]) -> Uneven:
    """The sizes of dims that may be split unevenly on some axis of the mesh, and the units of their parts; () if every
    axis divides what it could split. `ops`: those of the graph that differ.
    """
    axes = sorted({size for size in mesh_shape if size > 1})
    large = _large_extents(graph)
    batch = {item.value.shape[0] for item in graph.of_kind("argument") if item.value.shape}
    pairs = _pairs(ops) if axes else ()
    heads = {few for pair in pairs for few in pair if any(few < many and many % few == 0 for many in large & set(pair))}
    offered = {
        extent: {1} for extent in sorted(batch | large | heads) if extent > 1 and any(extent % size for size in axes)
    }
    offered = {extent: units for extent, units in offered.items() if any(extent > size for size in axes)}
    _carry(offered, pairs)
    return tuple((extent, tuple(sorted(units))) for extent, units in sorted(offered.items()))


def shared_extents(graph: Graph, ops: Sequence[Op], mesh: Mesh) -> SharedRows | None:
    """The shares on `mesh`, and all sizes that are split so; None if none are. `ops`: those that differ."""
    if not mesh.shares:
        return None
    ((axis, sizes),) = mesh.shares
    extents = _extents(graph, ops) if graph.batch_extents is None else graph.batch_extents
    rows = max((extent // units[0] for extent, units in extents if units), default=0)  # of which all are made
    if mesh.shape[axis] == 1 or rows < mesh.shape[axis]:
        return None
    return SharedRows(axis, sizes, extents)


def batch_extents(graph: Graph) -> Uneven:
    """The sizes of dims that the rows of the batch make up, alone or with others, and the elements of each row there;
    () if no argument has rows.
    """
    return _extents(graph, graph.ops)


def _extents(graph: Graph, ops: Sequence[Op]) -> Uneven:
    rows = next((item.value.shape[0] for item in graph.of_kind("argument") if item.value.shape), 0)
    if not rows:
        return ()
    offered = {rows: {1}}
    _carry(offered, _pairs(ops))
    return tuple((extent, tuple(sorted(units))) for extent, units in sorted(offered.items()))


def _large_extents(graph: Graph) -> set[int]:
    parameters = graph.of_kind("parameter")
    sizes = [math.prod(item.value.shape) for item in parameters]
    least = LARGE_SHARE * sum(sizes)
    return {extent for item, size in zip(parameters, sizes) if size >= least for extent in item.value.shape}


def _pairs(ops: Iterable[Op]) -> tuple[tuple[int, ...], ...]:
    """The different sizes that are split together by some op."""
    found = (_sizes_together(op.nameless) for op in ops if op.target in PROPORTIONAL)
    return tuple(dict.fromkeys(sizes for together in found for sizes in together))


@per_rules
def _sizes_together(op: Op) -> tuple[tuple[int, ...], ...]:
    each = (tuple(sorted(set(extents_of(op, signature).values()))) for signature in signatures_of(op))
    return tuple(dict.fromkeys(sizes for sizes in each if len(sizes) > 1))


def _carry(offered: dict[int, set[int]], pairs: Iterable[tuple[int, ...]]) -> None:
    """Extend the units by those that follow from others."""
    is_new = bool(offered)
    while is_new:
        is_new = False
        for sizes in pairs:
            for extent, units in proportional(sizes, {size: tuple(offered.get(size, ())) for size in sizes}):
                is_new |= not units <= offered.get(extent, set())
                offered.setdefault(extent, set()).update(units)


def proportional(sizes: Iterable[int], units: Mapping[int, Iterable[int]]) -> Iterator[tuple[int, set[int]]]:
    """For each of the `sizes` that are split in as many parts the units that go with the `units` of some of them."""
    counts = {size // unit for size in sizes for unit in units[size]}
    counts = {count for count in counts if all(size % count == 0 for size in sizes)}
    yield from ((size, {size // count for count in counts}) for size in sizes)
