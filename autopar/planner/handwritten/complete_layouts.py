"""`complete`: the assignment of given strategies, with each layout left open chosen for the least communication."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from autopar.costmodel.activations.autograd_footprint import regatherable
from autopar.ir.folding.fold import Folded, value_classes
from autopar.ir.graph import Graph, Value
from autopar.ir.inference.carried import carried_values
from autopar.mesh import Mesh
from autopar.sbp.assignment import Assignment, produced_layouts, wanted_layout
from autopar.sbp.placement import Layout, is_convertible, local_shape
from autopar.sbp.redistribute import NEVER_BYTES, collectives_of, redistribute
from autopar.sbp.signature import Candidates, Strategy


@dataclass(frozen=True)
class ParameterStorage:
    """How parameters are stored: on `sharded_axes` in as many parts as divide. is_regathered: what is gathered of them
    for forward is freed, and gathered again for backward, where that can be (ZeRO-3, not ZeRO-2).
    """

    sharded_axes: tuple[int, ...] = ()
    is_regathered: bool = False


WHOLE = ParameterStorage()


@dataclass(frozen=True)
class Moved:
    """`num_bytes(shape, bytes of an element, does it need a gradient, from layout, to layout)` on `mesh`."""

    mesh: Mesh
    num_bytes: Callable[[tuple[int, ...], int, bool, Layout, Layout], int]


def bytes_moved(mesh: Mesh) -> Moved:
    """The function from a conversion to the bytes that it moves on the mesh, forward and backward, with a cache."""

    @cache
    def moved(shape: tuple[int, ...], itemsize: int, needs_grad: bool, src: Layout, dst: Layout) -> int:
        if not is_convertible(src, dst):
            return NEVER_BYTES
        steps = (collectives_of(step, shape, itemsize, mesh.shape, needs_grad) for step in redistribute(src, dst))
        return sum(collective.num_bytes for collectives in steps for collective in collectives)

    return Moved(mesh, moved)


def complete(
    graph: Graph,
    folded: Folded,
    candidates: Candidates,
    strategies: Mapping[str, Strategy],
    arguments: Mapping[str, Layout],
    moved: Moved,
    *,
    storage: ParameterStorage = WHOLE,
    counts: Mapping[str, int] = MappingProxyType({}),
) -> Assignment:
    """The assignment of `strategies` with stored, kept and output layouts.

    `moved`: `bytes_moved(mesh)`. `counts`: op of a repeat -> the number of copies that it represents.
    """
    wanted, carried = _wanted(graph, strategies), graph.once(carried_values)
    layouts = {name: layout for name, layout in arguments.items() if name not in carried}
    stored = [item for item in graph.inputs if item.value.name not in layouts]
    for item in (item for item in stored if folded.representative[item.value.name] == item.value.name):
        offered = candidates.layouts[item.value.name]
        if item.kind == "parameter" and storage.sharded_axes:
            offered = _most_parts(item.value, offered, wanted[item.value.name], storage.sharded_axes, moved)
        layouts[item.value.name] = min(
            offered,
            key=lambda layout: (
                _bytes_to(item.value, layout, wanted[item.value.name], moved),
                # of inference, where no gradient is gathered, a part that is read alone is stored alone
                not item.value.needs_grad and math.prod(local_shape(item.value.shape, layout, moved.mesh.shape)),
            ),
        )
    layouts |= {item.value.name: layouts[folded.representative[item.value.name]] for item in stored}
    outputs = _outputs(graph, candidates, strategies, layouts, moved)
    bare = Assignment(strategies, layouts, {}, outputs)
    again = _regathered(graph, folded, layouts, wanted) if storage.is_regathered else frozenset()
    return replace(bare, kept=_kept(graph, folded, bare, moved, counts), regathered=again)


def _regathered(
    graph: Graph, folded: Folded, layouts: Mapping[str, Layout], wanted: Mapping[str, tuple[Layout, ...]]
) -> frozenset[str]:
    """The parameters that are stored in another layout than the one in which their only reader reads them."""
    classes = folded.representative
    again = {
        name
        for name in regatherable(graph, classes)
        for want in wanted[name]
        if any(stored.is_split and stored != other for stored, other in zip(layouts[name], want))
    }
    return frozenset(item.value.name for item in graph.of_kind("parameter") if classes[item.value.name] in again)


def _wanted(graph: Graph, strategies: Mapping[str, Strategy]) -> dict[str, tuple[Layout, ...]]:
    """Name of each input value -> the distinct layouts in which ops read it."""
    wanted: dict[str, dict[Layout, None]] = {item.value.name: {} for item in graph.inputs}
    for op in graph.ops:
        for slot, value in enumerate(op.inputs):
            if value.name in wanted:
                wanted[value.name][strategies[op.name].input_layout(slot)] = None
    return {name: tuple(layouts) for name, layouts in wanted.items()}


def _most_parts(
    value: Value, offered: Iterable[Layout], wanted: tuple[Layout, ...], axes: tuple[int, ...], moved: Moved
) -> tuple[Layout, ...]:
    """The layout with the most parts on `axes` among those that are as read on all other axes.

    Ties: the fewest bytes moved, then one split dim rather than several, then the first.
    """
    others = [axis for axis in range(moved.mesh.ndim) if axis not in axes]

    def key(layout: Layout) -> tuple[int, int, int, int, tuple[int, ...]]:
        dims = {placement.dim for placement in layout if placement.is_split}
        parts = math.prod(moved.mesh.shape[axis] for axis in axes if layout[axis].is_split)
        differs = sum(layout[axis] != want[axis] for want in wanted for axis in others)
        return differs, -parts, _bytes_to(value, layout, wanted, moved), len(dims), tuple(sorted(dims))

    return (min(offered, key=key),)


def _outputs(
    graph: Graph,
    candidates: Candidates,
    strategies: Mapping[str, Strategy],
    layouts: Mapping[str, Layout],
    moved: Moved,
) -> dict[str, Layout]:
    produced = produced_layouts(graph, Assignment(strategies, layouts, {}, {}))
    return {
        v.name: min(candidates.outputs[v.name], key=lambda layout: _bytes_to(v, produced[v.name], (layout,), moved))
        for v in graph.placed_outputs
    }


def _kept(
    graph: Graph, folded: Folded, assignment: Assignment, moved: Moved, counts: Mapping[str, int]
) -> dict[str, Layout]:
    """The kept layouts of values with several uses: for each class that with the fewest bytes moved for all uses."""
    produced, classes = produced_layouts(graph, assignment), value_classes(graph, folded)
    values = {item.value.name: item.value for item in graph.inputs} | {
        v.name: v for op in graph.ops for v in op.outputs
    }
    several = {name: uses for name, uses in graph.uses.items() if len(uses) > 1}
    makers = {value.name: counts[op.name] for op in graph.ops if op.name in counts for value in op.outputs}
    wanted = {
        name: tuple(
            (wanted_layout(graph, assignment, use), makers.get(name) or counts.get(use.user, 1)) for use in uses
        )
        for name, uses in several.items()
    }
    bases: dict[str, dict[Layout, None]] = {}
    for name, layouts in wanted.items():
        bases.setdefault(classes[name], {}).update(dict.fromkeys((produced[name], *(layout for layout, _ in layouts))))
    sums: dict[str, Counter[Layout]] = {name: Counter() for name in bases}
    for name, layouts in wanted.items():
        sums[classes[name]].update(
            {base: _bytes_via(values[name], produced[name], base, layouts, moved) for base in bases[classes[name]]}
        )
    best = {name: min(costs, key=costs.__getitem__) for name, costs in sums.items()}
    return {name: best[classes[name]] for name in wanted}


def _bytes_via(
    value: Value, produced: Layout, base: Layout, wanted: tuple[tuple[Layout, int], ...], moved: Moved
) -> int:
    """Bytes of converting each value to `base` once, and from there for each use."""
    first = min(count for _, count in wanted) * _bytes_to(value, produced, (base,), moved)
    return first + sum(count * _bytes_to(value, base, (layout,), moved) for layout, count in wanted)


def _bytes_to(value: Value, src: Layout, wanted: Iterable[Layout], moved: Moved) -> int:
    """Bytes moved, forward and backward, by converting `src` to each of `wanted`."""
    return sum(moved.num_bytes(value.shape, value.dtype.itemsize, value.needs_grad, src, dst) for dst in wanted)
