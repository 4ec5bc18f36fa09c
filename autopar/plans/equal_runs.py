"""Which copies of a repeat a plan treats alike."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.folding.segments import segmented
from autopar.ir.graph import Graph, Op
from autopar.sbp.assignment import INPUT, KEPT, OP, Assignment


def as_planned(folded: Folded, graph: Graph, assignment: Assignment) -> Folded:
    """`folded` with each run of neighbouring copies for which the plan chooses the same as a class of its own."""
    # not OUTPUT: a value of one copy may leave the graph where those of the others do not
    of_ops, of_values = assignment.chosen(OP), assignment.chosen(INPUT, KEPT)
    choices = [_choices(op, of_ops, of_values) for op in graph.ops]
    position = {op.name: i for i, op in enumerate(graph.ops)}
    runs = (_runs(repeat, position[repeat.ops[0]], choices) for repeat in folded.repeats)
    return segmented(folded, graph, tuple(runs))


def _runs(repeat: Repeat, first: int, choices: list[Any]) -> tuple[int, ...]:
    """Lengths of the runs of equal copies; the repeat begins with op number `first`."""
    block = len(repeat.ops)
    copies = [choices[first + copy * block : first + (copy + 1) * block] for copy in range(repeat.count)]
    return tuple(len(list(run)) for _, run in groupby(copies))


def _choices(op: Op, of_ops: Mapping[str, tuple], of_values: Mapping[str, tuple]) -> Any:
    return of_ops.get(op.name), [of_values.get(value.name) for value in (*op.inputs, *op.outputs)]
