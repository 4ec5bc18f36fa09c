"""Which copies of a repeat a plan treats alike."""

from collections.abc import Sequence, Set

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.folding.segments import segmented
from autopar.ir.graph import Graph
from autopar.sbp.assignment import Assignment


def as_planned(folded: Folded, graph: Graph, assignment: Assignment) -> Folded:
    """`folded` with each run of neighbouring copies that have the same strategies and layouts as a class of its own."""
    return segmented(folded, graph, tuple(_runs(repeat, graph, assignment) for repeat in folded.repeats))


def _runs(repeat: Repeat, graph: Graph, assignment: Assignment) -> tuple[int, ...]:
    position = {op.name: i for i, op in enumerate(graph.ops)}
    apart = [
        {name for region in regions for name in region} for regions in (assignment.recomputed, assignment.offloaded)
    ]
    first, block = position[repeat.ops[0]], len(repeat.ops)
    sizes: list[int] = []
    latest = None
    for copy in range(repeat.count):
        choices = _choices(graph, assignment, apart, first + copy * block, block)
        if choices == latest:
            sizes[-1] += 1
        else:
            sizes.append(1)
        latest = choices
    return tuple(sizes)


def _choices(graph: Graph, assignment: Assignment, apart: Sequence[Set[str]], first: int, block: int) -> list[tuple]:
    ops = graph.ops[first : first + block]
    return [
        (
            assignment.strategies[op.name],
            tuple(assignment.layouts.get(value.name) for value in op.inputs),
            tuple(assignment.kept.get(value.name) for value in (*op.inputs, *op.outputs)),
            tuple(value.name in assignment.regathered for value in op.inputs),
            tuple(op.name in names for names in apart),
            tuple(value.name in assignment.state_on_host for value in op.inputs),
        )
        for op in ops
    ]
