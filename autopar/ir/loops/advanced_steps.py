"""The steps of loops that were not traced: `autopar.advance` resolved in the loop of the steps that were."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.folding.match_blocks import wire
from autopar.ir.graph import Graph, Op
from autopar.ir.loops.advance_op import ADVANCE
from autopar.ir.loops.find_loops import StepLoop
from autopar.ir.loops.guess_steps import UnsureSteps

Place = tuple[int, int]  # op of a step, output


@dataclass(frozen=True)
class Advanced:
    """`loops` with all of their steps; `names`: (first op of a loop, place, step) -> the names of the values there that
    were not traced; `rows`: name of a value that is those of several steps -> (first op of the loop, place, first step,
    behind the last); `resolved`: the ops that need no loop but these.
    """

    loops: tuple[StepLoop, ...]
    names: dict[tuple[int, Place, int], list[str]]
    rows: dict[str, tuple[int, Place, int, int]]
    resolved: frozenset[str]


def advanced(graph: Graph, loops: Sequence[StepLoop]) -> Advanced:
    """The loops with the steps that were not traced."""
    names: dict[tuple[int, Place, int], list[str]] = defaultdict(list)
    rows: dict[str, tuple[int, Place, int, int]] = {}
    resolved = {op.name for op in graph.ops if op.target == ADVANCE and _resolve(graph, op, loops, names, rows)}
    steps = {loop.first: loop.steps for loop in loops}
    for first, _, step in names:
        steps[first] = max(steps[first], step + 1)
    return Advanced(tuple(replace(loop, steps=steps[loop.first]) for loop in loops), names, rows, frozenset(resolved))


def _resolve(
    graph: Graph,
    op: Op,
    loops: Sequence[StepLoop],
    names: dict[tuple[int, Place, int], list[str]],
    rows: dict[str, tuple[int, Place, int, int]],
) -> bool:
    """Whether all results of `op` that are read are values of `loops`; if so, their `names` and `rows` are added."""
    found: list[Any] = []
    for value, number, by, num in zip(op.outputs, *op.args[1:], strict=True):
        if value.name not in graph.uses:
            continue
        made, output = graph.once(wire).sources[graph.position[op.name]][op.args[0][number].index]
        loop = next((loop for loop in loops if loop.first <= made < loop.stop), None)
        if loop is None:
            return False
        step, place = divmod(made - loop.first, loop.block)
        key = loop.first, (place, output), step + by
        found.append((key, value.name) if not num else ((*key[:2], step + by + num - 1), (key, value.name)))
    for key, name in found:
        if isinstance(name, str):
            names[key].append(name)
        else:
            names[key]  # there is such a step
            rows[name[1]] = (*name[0], key[2] + 1)
    return True


def check_all_resolved(graph: Graph) -> None:
    """UnsureSteps if some steps that were not traced are of no loop."""
    if any(op.target == ADVANCE and any(value.name in graph.uses for value in op.outputs) for op in graph.ops):
        raise UnsureSteps("steps that were not traced belong to no loop that was found")


def check_index(start: int, stride: int, steps: int, size: int) -> None:
    """UnsureSteps if some step would read an index that is not there."""
    ends = {start, start + stride * (steps - 1)}
    if not (ends <= set(range(size)) or ends <= set(range(-size, 0))):
        raise UnsureSteps("steps that were not traced read an index that is not there")
