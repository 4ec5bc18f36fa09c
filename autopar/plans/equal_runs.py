"""`as_planned`: the runs of a repeat's copies for which a plan makes the same choices."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.folding.segments import segmented
from autopar.ir.graph import Graph, Op
from autopar.sbp.assignment import INPUT, KEPT, OP, Assignment


def as_planned(folded: Folded, graph: Graph, assignment: Assignment) -> Folded:
    """`folded` in which each run of neighbouring copies with the same choices is a class of its own."""
    # not OUTPUT: a value of one copy may be an output of the graph where those of the others are not
    of_ops, of_values = assignment.chosen(OP), assignment.chosen(INPUT, KEPT)
    choices = [_choices(op, of_ops, of_values) for op in graph.ops]
    position = graph.position
    runs = (_runs(repeat, position[repeat.ops[0]], choices) for repeat in folded.repeats)
    return segmented(folded, graph, tuple(runs))


def _runs(repeat: Repeat, first: int, choices: list[Any]) -> tuple[int, ...]:
    """The lengths of the runs of copies with equal choices; the repeat begins with op number `first`."""
    block = len(repeat.ops)
    copies = [choices[first + copy * block : first + (copy + 1) * block] for copy in range(repeat.count)]
    return tuple(len(list(run)) for _, run in groupby(copies))


def _choices(op: Op, of_ops: Mapping[str, tuple], of_values: Mapping[str, tuple]) -> Any:
    return of_ops.get(op.name), [of_values.get(value.name) for value in (*op.inputs, *op.outputs)]
