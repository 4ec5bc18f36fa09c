"""`fit_assignment`: a plan's choices for a graph of the same model with other shapes, or other microbatches."""

from autopar.costmodel.activations.autograd_footprint import regatherable
from autopar.costmodel.activations.recomputable import saves
from autopar.costmodel.state_offload import hostable
from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh
from autopar.plans.validate import can_be_kept
from autopar.sbp.analysis.extra_signatures import extra_signatures
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import Extra, annotate, nearest_strategy, neighbours_of
from autopar.sbp.placement import I, Layout, format_layout, is_convertible
from autopar.sbp.signature import Strategy
from autopar.sbp.uneven.uneven_extents import shared_extents, uneven_extents


def fit_assignment(assignment: Assignment, graph: Graph, mesh: Mesh) -> Assignment:
    """The choices of `assignment` that are valid for `graph`, by the names of ops and values, and others in place of
    the rest.

    A layout that does not divide a tensor gives way to the nearest that does. An op whose strategy does not divide, or
    that the assignment does not know, gets the one that is nearest to how its inputs lie: any valid strategy computes
    the same numbers.
    """
    candidates = annotate(graph, mesh, near={})  # of layouts only
    layouts = {name: _nearest(assignment.layouts.get(name), offered) for name, offered in candidates.layouts.items()}
    outputs = {name: _nearest(assignment.outputs.get(name), offered) for name, offered in candidates.outputs.items()}
    produced, strategies, routed = dict(layouts), dict[str, Strategy](), extra_signatures(graph)
    uneven, shared = uneven_extents(graph, graph.ops, mesh.shape), shared_extents(graph, graph.ops, mesh)
    for op in graph.ops:
        reads = tuple(produced[value.name] for value in op.inputs)
        extra = Extra.of(op, routed, uneven, shared)
        strategy = _strategy(op, assignment.strategies.get(op.name), mesh, reads, extra)
        strategies[op.name] = strategy
        produced.update((value.name, strategy.output_layout(index)) for index, value in enumerate(op.outputs))
    regathered = assignment.regathered
    if regathered:
        regathered &= regatherable(graph, {name: name for name in (*strategies, *layouts)})
    return Assignment(
        strategies,
        layouts,
        _kept(assignment, graph, mesh, Assignment(strategies, layouts, {}, outputs)),
        outputs,
        regathered,
        _regions(assignment.recomputed, graph),
        _regions(assignment.offloaded, graph),
        assignment.state_on_host & {item.value.name for item in hostable(graph)},
    )


def _nearest(wanted: Layout | None, offered: tuple[Layout, ...]) -> Layout:
    """The layout that differs from the `wanted` one on the fewest axes, by default from the whole."""
    near = wanted or (I,) * len(offered[0])
    return min(offered, key=lambda layout: (sum(a != b for a, b in zip(layout, near)), format_layout(layout)))


def _strategy(op: Op, planned: Strategy | None, mesh: Mesh, reads: tuple[Layout, ...], extra: Extra) -> Strategy:
    """The `planned` strategy if it is valid and the op's inputs, which lie as in `reads`, can be converted for it."""
    same = neighbours_of(op.nameless, mesh.shape, planned, 0, extra) if planned is not None else ()
    for one in same:
        if all(is_convertible(layout, one.input_layout(slot)) for slot, layout in enumerate(reads)):
            return one
    return nearest_strategy(op.nameless, mesh.shape, reads, extra)


def _kept(planned: Assignment, graph: Graph, mesh: Mesh, fitted: Assignment) -> dict[str, Layout]:
    """The layouts to which values with several uses are converted first, of values that lie and are read as planned."""
    changed = {name for name, layout in fitted.layouts.items() if planned.layouts.get(name) != layout}
    changed |= {name for name, layout in fitted.outputs.items() if planned.outputs.get(name) != layout}
    for op in graph.ops:
        if planned.strategies.get(op.name) != fitted.strategies[op.name]:
            changed.update(value.name for value in (*op.inputs, *op.outputs))
    values = {item.value.name: item.value for item in graph.inputs} | {
        v.name: v for op in graph.ops for v in op.outputs
    }
    several = {name for name, uses in graph.uses.items() if len(uses) > 1} - changed
    return {
        name: layout
        for name, layout in planned.kept.items()
        if name in several and can_be_kept(values[name], layout, mesh)
    }


def _regions(planned: tuple[tuple[str, ...], ...], graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The ops from the first to the last that the graph has of each region."""
    position, regions = {op.name: index for index, op in enumerate(graph.ops)}, []
    for region in planned:
        own = [position[name] for name in region if name in position]
        ops = graph.ops[min(own) : max(own) + 1] if own else ()
        regions += [tuple(op.name for op in ops)] if any(map(saves, ops)) else []
    return tuple(regions)
