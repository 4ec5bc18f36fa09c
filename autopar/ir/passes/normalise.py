"""`normalise`: the tuple of passes that make traced graphs small and uniform.

Each pass takes a valid Graph and returns a valid Graph that computes the same.
"""

from collections.abc import Callable

from autopar.ir.attention.constant_masks import recognise_masks
from autopar.ir.experts.count_sorted import count_sorted
from autopar.ir.experts.route_loops import route_loops
from autopar.ir.experts.unflatten_repeats import unflatten_repeats
from autopar.ir.folding.order_free_ops import order_free_ops
from autopar.ir.functions.turn_functions import turn_functions
from autopar.ir.graph import Graph
from autopar.ir.lookups.even_bags import keep_even_bags
from autopar.ir.loops.roll_up import roll_up
from autopar.ir.masks.scatter_rows import scatter_rows
from autopar.ir.passes.broadcast_tensors import unfold_broadcasts
from autopar.ir.passes.canonicalise import canonicalise
from autopar.ir.passes.common_subexpressions import merge_duplicates
from autopar.ir.passes.dead_code import drop_dead, fill_by_shape
from autopar.ir.passes.drop_identities import drop_identities, keep_rows_contiguous
from autopar.ir.passes.merge_reshapes import merge_reshapes
from autopar.ir.passes.row_gather import read_own_rows
from autopar.ir.passes.split_constants import offset_by_constants, split_constants
from autopar.ir.passes.turn_grouped import turn_grouped_weights
from autopar.ir.passes.unflatten_matmul import unflatten_linears, unflatten_products

PASSES: tuple[Callable[[Graph], Graph], ...] = (
    route_loops,
    scatter_rows,
    unfold_broadcasts,
    canonicalise,
    drop_identities,
    fill_by_shape,
    drop_dead,
    roll_up,
    unflatten_products,
    unflatten_linears,
    turn_grouped_weights,
    turn_functions,
    unflatten_repeats,
    keep_even_bags,
    merge_reshapes,
    drop_identities,  # a merged reshape may have the shape of its input
    count_sorted,
    read_own_rows,
    recognise_masks,
    drop_dead,
    merge_duplicates,
    keep_rows_contiguous,
    order_free_ops,
    offset_by_constants,
    split_constants,
    drop_dead,
)


def normalise(graph: Graph) -> Graph:
    """`graph` after all passes, in order."""
    for function in PASSES:
        graph = function(graph)
    return graph
