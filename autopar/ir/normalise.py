"""The passes that make traced graphs small and alike; each takes a valid Graph and returns a valid Graph that computes the same."""

from collections.abc import Callable

from autopar.ir.graph import Graph
from autopar.ir.passes.broadcasts import unfold_broadcasts
from autopar.ir.passes.canonical import canonicalise
from autopar.ir.passes.constant import split_constants
from autopar.ir.passes.dead import drop_dead
from autopar.ir.passes.duplicates import merge_duplicates
from autopar.ir.passes.identities import drop_identities
from autopar.ir.passes.own_rows import read_own_rows
from autopar.ir.passes.products import unflatten_products
from autopar.ir.passes.reshapes import merge_reshapes

PASSES: tuple[Callable[[Graph], Graph], ...] = (
    unfold_broadcasts,
    canonicalise,
    drop_identities,
    unflatten_products,
    merge_reshapes,
    drop_identities,  # a merged reshape may lead back to where it began
    read_own_rows,
    drop_dead,
    merge_duplicates,
    split_constants,
    drop_dead,
)


def normalise(graph: Graph) -> Graph:
    """Run all passes in order."""
    for function in PASSES:
        graph = function(graph)
    return graph
