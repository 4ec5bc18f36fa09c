"""`price`: the cost table of a graph on a mesh, with the seconds and bytes of every option and of
every pair of them.
"""

import math
from dataclasses import dataclass

from autopar.costmodel.activations.saved_activations import Regions
from autopar.costmodel.cluster.hardware import Cluster, check_mesh
from autopar.costmodel.pricing.flows import Entity, find_flows
from autopar.costmodel.pricing.price_edges import price_edges
from autopar.costmodel.pricing.price_nodes import price_nodes
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.analysis.sampled_graph import of_graph, sampled
from autopar.sbp.signature import Candidates
from autopar.search.table import CostTable


@dataclass(frozen=True)
class Priced:
    """A cost table with its entities: `table.nodes[i]` prices the options of `entities[i]`.

    `recomputed`, `offloaded`, `state_on_host`: as in `Assignment`, given for the whole table. The table is exact: the
    cost and memory of a choice equal those of `evaluate` for its assignment. Equal entries, such as those of a block's
    copies, are one array.
    """

    table: CostTable
    entities: tuple[Entity, ...]
    recomputed: Regions = ()
    offloaded: Regions = ()
    state_on_host: frozenset[str] = frozenset()


def price(
    graph: Graph,
    folded: Folded,
    candidates: Candidates,
    mesh: Mesh,
    cluster: Cluster,
    *,
    training: Training = WHOLE_BATCH,
    recomputed: Regions = (),
    offloaded: Regions = (),
    state_on_host: frozenset[str] = frozenset(),
    memory_limit_bytes: float = math.inf,
) -> Priced:
    """Price everything `candidates` offers, for one training step of `training`. recomputed, offloaded, state_on_host:
    as in `Assignment`.

    MeshError if the mesh does not fit the cluster.
    """
    check_mesh(cluster, mesh.num_devices)
    few = sampled(graph, folded, (recomputed, offloaded), state_on_host)
    here = (of_graph(recomputed, few.graph), of_graph(offloaded, few.graph))
    flows = find_flows(few, folded, candidates, cluster, *here, training, state_on_host)
    nodes = price_nodes(few.graph, flows, mesh, cluster, training)
    table = CostTable(*price_edges(flows, nodes, mesh, cluster, training), memory_limit_bytes)
    return Priced(table, flows.entities, recomputed, offloaded, state_on_host)
