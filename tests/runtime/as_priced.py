"""Whether what ranks issue is what was priced."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from autopar.ir.graph import Graph
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import is_even
from autopar.sbp.redistribute import Collective


def has_uneven_parts(graph: Graph, assignment: Assignment, mesh_shape: tuple[int, ...]) -> bool:
    """Whether some value lies in parts of different sizes, of which the first rank has the largest."""
    values = {item.value.name: item.value for item in graph.inputs} | {
        v.name: v for op in graph.ops for v in op.outputs
    }
    read = (
        (value, assignment.strategies[op.name].input_layout(i)) for op in graph.ops for i, value in enumerate(op.inputs)
    )
    made = (
        (value, assignment.strategies[op.name].output_layout(i))
        for op in graph.ops
        for i, value in enumerate(op.outputs)
    )
    stored = ((values[name], layout) for name, layout in (*assignment.layouts.items(), *assignment.kept.items()))
    return any(not is_even(value.shape, layout, mesh_shape) for value, layout in (*read, *made, *stored))


def is_as_priced(
    counted: Counter[Collective], priced: Counter[Collective], *, is_exact: bool, is_first: bool = True
) -> bool:
    """Whether a rank issued what was priced; unless `is_exact`, collectives of backward may be missing.

    Where parts differ, the price is of those of the first rank: others send as many tensors, which may be smaller.
    """
    if not is_first:
        return _is_at_most(counted, priced, is_exact=is_exact)
    missing = priced - counted
    return not counted - priced and (not missing or (not is_exact and all(c.phase == "backward" for c in missing)))


def _is_at_most(counted: Counter[Collective], priced: Counter[Collective], *, is_exact: bool) -> bool:
    found, wanted = totals([counted]), totals([priced])
    return all(
        number <= wanted.get(key, (0, 0))[0] and size <= wanted[key][1] for key, (number, size) in found.items()
    ) and all(found.get(key, (0, 0))[0] == wanted[key][0] or (not is_exact and key[2] == "backward") for key in wanted)


def are_as_priced(reports: Sequence[Mapping[str, Any]], *, is_exact: bool) -> bool:
    """`is_as_priced` of all ranks together: how many collectives of a kind there are and their bytes, of which ranks
    that exchange rows by expert have different shares.
    """
    issued, planned = (totals(report[name] for report in reports) for name in ("issued", "planned"))
    missing = {key for key in planned if issued.get(key, (0, 0)) < planned[key]}
    exceeds = any(found > planned.get(key, (0, 0)) for key, found in issued.items())
    return not exceeds and (not missing or (not is_exact and all(phase == "backward" for *_, phase in missing)))


def totals(each: Iterable[Counter[Collective]]) -> dict[tuple[str, tuple[int, ...], str], tuple[int, int]]:
    """Kind, axes and phase of collectives -> how many there are, and their bytes."""
    found: dict[tuple[str, tuple[int, ...], str], tuple[int, int]] = {}
    for one, count in chain.from_iterable(counter.items() for counter in each):
        key = one.kind, one.axes, one.phase
        number, num_bytes = found.get(key, (0, 0))
        found[key] = number + count, num_bytes + count * one.num_bytes
    return found
