"""From a case to its graph and to the numbers that a search is given."""

from dataclasses import dataclass

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.pricing.encode_decode import encode
from autopar.costmodel.pricing.price import price
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.models.catalogue import Example, build_model
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.sbp.candidates import annotate
from autopar.search.table import CostTable
from bench.suite import Case


@dataclass(frozen=True)
class Problem:
    """A graph, its table, limited to what a device of the cluster can hold, and the hand plans as choices of it."""

    graph: Graph
    table: CostTable
    starts: tuple[tuple[int, ...], ...]


def example_of(case: Case) -> Example:
    """The case's model and batch."""
    sizes = {"layers": case.layers, "batch": case.batch, "sequence": case.sequence}
    return build_model(case.model, **sizes)


def graph_of(example: Example) -> Graph:
    """The traced forward."""
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


def problem_of(case: Case) -> Problem:
    """What the search is given for this case, whose mesh has its axes."""
    graph, mesh, cluster = graph_of(example_of(case)), parse_mesh(case.mesh), load_cluster(case.cluster)
    plain = fold(graph)
    folded = segmented(plain, graph, ends_apart(plain))
    candidates = annotate(graph, mesh, folded)
    priced = price(graph, folded, candidates, mesh, cluster, memory_limit_bytes=usable_memory_bytes(cluster))
    hand = hand_plans(graph, folded, candidates, mesh)
    return Problem(
        graph, priced.table, tuple(encode(priced, graph, folded, assignment) for assignment in hand.values())
    )
