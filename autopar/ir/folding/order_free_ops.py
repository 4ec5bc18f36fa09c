"""The pass that orders ops without parameters by their use, whatever order the model computes them in.

A model that loops over a `set` (of kinds of layers, say) makes its masks and positions in another order in each
process, and a plan that was saved in one must fit the graphs of the others.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from autopar.ir.export.op_builder import stem_of
from autopar.ir.graph import Graph, Op, Value
from autopar.ir.op_facts import is_random


def order_free_ops(graph: Graph) -> Graph:
    """`graph` with each run of ops that depend on no parameter in the order in which what follows reads them, depth
    first; the names of a run are given out again in that order. Random ops stay where they are.
    """
    free = _free(graph)
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        for name in dict.fromkeys(value.name for value in op.inputs):
            readers[name].append(op)
    given = [item for item in graph.outputs if isinstance(item, Value)] + [value for _, value in graph.mutations]
    place: dict[str, int] = {}  # of ops that are ordered, from the end
    ordered: list[Op] = []
    renamed: dict[str, str] = {}
    for is_free, run in reversed([(key, list(part)) for key, part in groupby(graph.ops, lambda op: op.name in free)]):
        part = _by_use(run, readers, given, place) if is_free else run
        renamed |= _names(run, part) if is_free else {}
        for op in reversed(part):
            place[op.name] = -len(place)
            ordered.append(op)
    ordered.reverse()
    return graph if tuple(ordered) == graph.ops else _with_names(replace(graph, ops=tuple(ordered)), renamed)


def _free(graph: Graph) -> set[str]:
    """The ops that depend on no parameter and no random number."""
    bound = {item.value.name for item in graph.of_kind("parameter")}
    free = set()
    for op in graph.ops:
        if not bound.isdisjoint([value.name for value in op.inputs]) or is_random(op):
            bound.update([value.name for value in op.outputs])
        else:
            free.add(op.name)
    return free


def _by_use(
    run: Sequence[Op], readers: Mapping[str, Sequence[Op]], given: Sequence[Value], place: Mapping[str, int]
) -> list[Op]:
    made = {value.name: op for op in run for value in op.outputs}
    behind = {op.name: op for name in made for op in readers[name] if op.name in place}
    first = sorted(behind.values(), key=lambda op: place[op.name])
    found: dict[str, Op] = {}
    for value in [*(value for op in first for value in op.inputs), *given, *(v for op in run for v in op.outputs)]:
        found.update((op.name, op) for op in _needed(value, made, found))
    return list(found.values())


def _needed(value: Value, made: Mapping[str, Op], found: Mapping[str, Op]) -> Iterator[Op]:
    """The ops of `made` that `value` needs and that are not `found`, each behind those that it needs itself."""
    seen: set[str] = set()
    pending = [(made[value.name], False)] if value.name in made else []
    while pending:
        op, is_ready = pending.pop()
        if is_ready:
            yield op
        elif op.name not in seen and op.name not in found:
            seen.add(op.name)
            pending.append((op, True))
            pending += [(made[one.name], False) for one in reversed(op.inputs) if one.name in made]


def _names(run: Sequence[Op], ordered: Sequence[Op]) -> dict[str, str]:
    """The names of a run, given out again: those of a stem in the order of their numbers."""
    names: dict[str, list[str]] = defaultdict(list)
    for op in sorted(run, key=lambda op: [int(number) for number in re.findall(r"\d+", op.name)]):
        names[stem_of(op.name)].append(op.name)
    left = {stem: iter(each) for stem, each in names.items()}
    return {op.name: next(left[stem_of(op.name)]) for op in ordered}


def _with_names(graph: Graph, renamed: Mapping[str, str]) -> Graph:
    """`graph` with ops under other names, and their outputs with them."""
    values: dict[str, Value] = {}
    for op in graph.ops:
        name = renamed.get(op.name, op.name)
        for number, value in enumerate(op.outputs if name != op.name else ()):
            if value.name in (op.name, f"{op.name}_out{number}"):
                values[value.name] = replace(value, name=name + value.name[len(op.name) :])

    def now(item: Any) -> Any:
        return values.get(item.name, item) if isinstance(item, Value) else item

    def of(op: Op) -> Op:
        """The op under its name now, itself where that and all that it reads and makes stay."""
        name = renamed.get(op.name, op.name)
        if name == op.name and values.keys().isdisjoint([value.name for value in op.inputs]):
            return op
        return replace(op, name=name, inputs=tuple(map(now, op.inputs)), outputs=tuple(map(now, op.outputs)))

    return replace(
        graph,
        ops=tuple(map(of, graph.ops)),
        outputs=tuple(map(now, graph.outputs)),
        mutations=tuple((fqn, now(value)) for fqn, value in graph.mutations),
    )
