"""The stages of a plan of the sweep: a microbatch's graph cut as it says, and its layouts for the whole of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.activations.saved_activations import Regions
from autopar.ir.folding.fold import Folded, value_classes
from autopar.ir.graph import Graph, Value
from autopar.ir.split_stages import StageGraph
from autopar.planner.pipeline.sweep import Model, Staged
from autopar.plans.staged_plan import stage_graphs
from autopar.sbp.analysis.sample_blocks import fold_microbatch
from autopar.sbp.assignment import Assignment, produced_layouts, uses_of
from autopar.sbp.placement import I, Layout


@dataclass(frozen=True, eq=False)
class Cut:
    """A microbatch's graph in stages, and the plan by hand that they start from."""

    graph: Graph
    folded: Folded
    stages: tuple[StageGraph, ...]
    starts: tuple[str, ...]
    by_hand: Assignment
    regions: Regions


def cut_as(model: Model, found: Staged) -> Cut:
    """The stages that a plan of the sweep has."""
    starts = tuple(model.graph.ops[model.starts[block]].name for block in found.partition.starts[1:])
    micro, stages = stage_graphs(model.graph, starts, found.schedule.num_microbatches)
    folded = fold_microbatch(model.folded, micro)
    by_hand = _expanded(found.assignment, model, micro.graph, folded)
    return Cut(micro.graph, folded, stages, starts, by_hand, recomputable(folded, micro.graph))


def _expanded(assignment: Assignment, model: Model, graph: Graph, folded: Folded) -> Assignment:
    """The assignment of the shortened microbatch for the whole one."""
    classes = value_classes(graph, folded)
    several = tuple((name, classes[name]) for name, found in uses_of(graph).items() if len(found) > 1)
    short = replace(model.outline.short, whole=graph, folded=folded, several=several)
    return replace(short, graph=_only(graph, assignment)).expand(assignment)


def _only(graph: Graph, assignment: Assignment) -> Graph:
    return replace(graph, ops=tuple(op for op in graph.ops if op.name in assignment.strategies))


def crossing_layouts(cut: Cut) -> dict[str, Layout]:
    """What crosses a cut, as the plan by hand makes it; whole where its sum, or its gradient's, would be pending."""
    produced = produced_layouts(cut.graph, cut.by_hand)
    names = {name for stage in cut.stages for name in stage.sends}
    return {name: tuple(placement if placement.is_split else I for placement in produced[name]) for name in names}


def restricted(assignment: Assignment, graph: Graph, crossing: Mapping[str, Layout]) -> Assignment:
    """The part of a whole microbatch's assignment that is about one stage."""
    uses = uses_of(graph)
    sent = {
        value.name: crossing[value.name]
        for value in graph.outputs
        if isinstance(value, Value) and value.name in crossing
    }
    outputs = {
        v.name: assignment.outputs[v.name]
        for v in graph.outputs
        if isinstance(v, Value) and v.name in assignment.outputs
    }
    layouts = {
        item.value.name: crossing.get(item.value.name) or assignment.layouts[item.value.name] for item in graph.inputs
    }
    return Assignment(
        strategies={op.name: assignment.strategies[op.name] for op in graph.ops},
        layouts=layouts,
        kept={name: layout for name, layout in assignment.kept.items() if len(uses.get(name, ())) > 1},
        outputs=outputs | sent,
        regathered=frozenset(name for name in assignment.regathered if name in layouts),
    )
