"""Which stretches of a graph may be run again in backward instead of being kept."""

from collections.abc import Mapping

from autopar.costmodel.activations.autograd_footprint import Footprint, footprint, footprints
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Op


def recomputable(folded: Folded, graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The names of the ops of each copy of each repeat, in graph order, less those at its end that save nothing, such
    as the addition to the residual: to run these again would free nothing. Copies that save nothing at all are left
    out.
    """
    position = {op.name: i for i, op in enumerate(graph.ops)}
    known = footprints(graph, folded.representative)
    found = []
    for repeat in folded.repeats:
        first, block = position[repeat.ops[0]], len(repeat.ops)
        copies = (graph.ops[start : start + block] for start in range(first, first + block * repeat.count, block))
        found += [region for copy in copies if (region := _without_end(copy, known))]
    return tuple(found)


def saves(op: Op) -> bool:
    """Whether backward needs anything of `op`."""
    return _is_saving(footprint(op))


def _without_end(ops: tuple[Op, ...], known: Mapping[str, Footprint]) -> tuple[str, ...]:
    saving = [index for index, op in enumerate(ops) if _is_saving(known[op.name])]
    return tuple(op.name for op in ops[: saving[-1] + 1]) if saving else ()


def _is_saving(found: Footprint) -> bool:
    return bool(found.saved_inputs or found.saved_outputs or found.internal_bytes)
