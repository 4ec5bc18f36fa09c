"""`as_planned`: the runs of a repeat's copies for which a plan makes the same choices."""

from collections.abc import Hashable, Mapping
from itertools import groupby

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.folding.segments import segmented
from autopar.ir.graph import Graph
from autopar.sbp.assignment import INPUT, KEPT, OP, Assignment


def as_planned(folded: Folded, graph: Graph, assignment: Assignment) -> Folded:
    """`folded` in which each run of neighbouring copies with the same choices is a class of its own."""
    # not OUTPUT: a value of one copy may be an output of the graph where those of the others are not
    of_ops, of_values = (_numbered(assignment.chosen(*of)) for of in ((OP,), (INPUT, KEPT)))
    return segmented(folded, graph, tuple(_runs(graph, repeat, of_ops, of_values) for repeat in folded.repeats))


def _runs(graph: Graph, repeat: Repeat, of_ops: Mapping[str, int], of_values: Mapping[str, int]) -> tuple[int, ...]:
    """The lengths of the runs of copies with equal choices."""
    first, block = graph.position[repeat.ops[0]], len(repeat.ops)
    copies = []
    for start in range(first, first + repeat.count * block, block):
        numbers: list[int | None] = []
        for op in graph.ops[start : start + block]:
            numbers.append(of_ops.get(op.name))
            numbers += [of_values.get(value.name) for value in op.inputs]
            numbers += [of_values.get(value.name) for value in op.outputs]
        copies.append(numbers)
    return tuple(len(list(run)) for _, run in groupby(copies))


def _numbered(chosen: Mapping[str, tuple[tuple[str, object], ...]]) -> dict[str, int]:
    """Name -> a number, the same for equal choices."""
    by_choice: dict[Hashable, int] = {}
    by_id: dict[tuple, int] = {}  # equal choices are mostly one object, which has not to be hashed again
    numbers = {}
    for name, pairs in chosen.items():
        key = tuple([(what, id(choice)) for what, choice in pairs])
        if key not in by_id:
            by_id[key] = by_choice.setdefault(pairs, len(by_choice))
        numbers[name] = by_id[key]
    return numbers
