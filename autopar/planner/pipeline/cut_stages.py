"""`cut_as`: the stages of a point of the sweep, and its hand plan for the whole graph of a microbatch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.activations.saved_activations import Regions
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Value
from autopar.ir.split_stages import StageGraph
from autopar.mesh import Mesh
from autopar.planner.pipeline.hand_points import Model
from autopar.planner.pipeline.sweep import Staged
from autopar.plans.staged_plan import stage_graphs
from autopar.sbp.analysis.sample_blocks import classes_of, fold_microbatch
from autopar.sbp.assignment import Assignment, names_of, produced_layouts
from autopar.sbp.placement import I, Layout, is_even


@dataclass(frozen=True, eq=False)
class Cut:
    """The graph of a microbatch cut into stages, and the hand plan from which their search starts."""

    graph: Graph
    folded: Folded
    stages: tuple[StageGraph, ...]
    starts: tuple[str, ...]
    by_hand: Assignment
    regions: Regions
    mesh: Mesh


def cut_as(model: Model, point: Staged) -> Cut:
    """The cut of a point of the sweep."""
    starts = tuple(model.graph.ops[model.starts[block]].name for block in point.partition.starts[1:])
    micro, stages = stage_graphs(model.graph, starts, point.schedule.num_microbatches)
    folded = fold_microbatch(model.folded, micro)
    by_hand = _expanded(point.assignment, micro.graph, folded)
    return Cut(micro.graph, folded, stages, starts, by_hand, recomputable(folded, micro.graph), point.mesh)


def _expanded(assignment: Assignment, graph: Graph, folded: Folded) -> Assignment:
    """The assignment of the shortened microbatch for the whole one."""
    return assignment.expanded(graph.once(names_of), classes_of(graph, folded))


def crossing_layouts(cut: Cut) -> dict[str, Layout]:
    """Name of each boundary tensor -> its layout in the hand plan.

    It is whole on axes where it or its gradient would be pending, or its parts would differ and are no shares.
    """
    produced = produced_layouts(cut.graph, cut.by_hand)
    values = {value.name: value for op in cut.graph.ops for value in op.outputs}
    names = {name for stage in cut.stages for name in stage.sends}
    return {name: _even_part(values[name].shape, produced[name], cut.mesh) for name in names}


def _even_part(shape: tuple[int, ...], produced: Layout, mesh: Mesh) -> Layout:
    """The even ones of the splits, from the outermost axis on, the shares of a dim that nothing else splits, and I for
    everything else.
    """
    kept = (I,) * len(produced)
    for axis, placement in enumerate(produced):
        others = (*kept[:axis], I, *kept[axis + 1 :])
        more = (*kept[:axis], placement, *kept[axis + 1 :])
        if placement.shares:
            is_kept = all(one.dim != placement.dim for one in others)
        else:
            plain = tuple(I if one.shares else one for one in more)
            is_free = not any(one.shares and one.dim == placement.dim for one in others)
            is_plain = placement.kind == "S" and placement.unit == 1 and not placement.sections
            is_kept = is_plain and is_free and is_even(shape, plain, mesh.shape)
        kept = more if is_kept else kept
    return kept


def restricted(assignment: Assignment, graph: Graph, crossing: Mapping[str, Layout]) -> Assignment:
    """The part of a whole microbatch's assignment that concerns one stage, with these layouts of boundary tensors."""
    part = assignment.restricted(graph)
    received = {item.value.name: crossing[item.value.name] for item in graph.inputs if item.value.name in crossing}
    values = (value for value in graph.outputs if isinstance(value, Value))
    sent = {value.name: crossing[value.name] for value in values if value.name in crossing}
    return replace(part, layouts={**part.layouts, **received}, outputs={**part.outputs, **sent})
