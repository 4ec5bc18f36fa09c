"""The regions of a graph for activation checkpointing."""

from collections.abc import Mapping

from autopar.costmodel.activations.autograd_footprint import footprint, footprints
from autopar.ir.folding.fold import Folded
from autopar.ir.gradients.observed_footprint import Footprint
from autopar.ir.graph import Graph, Op


def recomputable(folded: Folded, graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The names of the ops of each region that may be recomputed, in graph order: the copies of the repeats.

    Ops at the end of a copy that save nothing, such as the addition to the residual, are left out, since recomputing
    them frees nothing. So are copies that save nothing at all.
    """
    position = graph.position
    known = footprints(graph, folded.representative)
    regions = []
    for repeat in folded.repeats:
        first, block = position[repeat.ops[0]], len(repeat.ops)
        copies = (graph.ops[start : start + block] for start in range(first, first + block * repeat.count, block))
        regions += [region for copy in copies if (region := _without_end(copy, known))]
    return tuple(regions)


def saves(op: Op) -> bool:
    """Whether autograd saves any tensor for `op`."""
    return _is_saving(footprint(op))


def _without_end(ops: tuple[Op, ...], known: Mapping[str, Footprint]) -> tuple[str, ...]:
    saving = [index for index, op in enumerate(ops) if _is_saving(known[op.name])]
    return tuple(op.name for op in ops[: saving[-1] + 1]) if saving else ()


def _is_saving(footprint: Footprint) -> bool:
    return bool(footprint.saved_inputs or footprint.saved_outputs or footprint.internal_bytes)
