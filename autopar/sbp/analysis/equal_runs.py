"""`as_planned`: the runs of a repeat's copies for which a plan makes the same choices."""

from collections.abc import Hashable, Iterable, Mapping
from itertools import groupby
from typing import Any

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


def _numbered(fields: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, int]:
    """Name -> a number, the same for names of which all fields say the same."""
    numbers: dict[str, int] = {}
    known: dict[tuple[int, str, int], int] = {}
    for field, choices in fields:
        by_choice: dict[Hashable, int] = {}
        by_id: dict[int, int] = {}  # equal choices are mostly one object, which has not to be hashed again
        for name, choice in choices.items():
            of_choice = by_id.get(id(choice))
            if of_choice is None:
                of_choice = by_id[id(choice)] = by_choice.setdefault(choice, len(by_choice))
            key = numbers.get(name, -1), field, of_choice
            numbers[name] = known.setdefault(key, len(known))
    return numbers
