"""`extra_signatures`: the signatures that ops have in a graph beyond those that their rules give."""

from autopar.ir.graph import Graph
from autopar.sbp.analysis.flat_losses import own_order_signatures
from autopar.sbp.analysis.section_signatures import section_signatures
from autopar.sbp.signature import Signature


def extra_signatures(graph: Graph) -> dict[str, tuple[Signature, ...]]:
    """Op name -> its signatures that follow from the ops around it: rows in each rank's own order, and splits of each
    section of a dim.
    """
    found = own_order_signatures(graph)
    for name, signatures in graph.once(section_signatures).items():
        found[name] = found.get(name, ()) + signatures
    return found
