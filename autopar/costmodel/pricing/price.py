"""The search problem of a graph on a mesh: every choice and every meeting of two choices in seconds and bytes."""

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
    """`table.nodes[i]` prices the options of `entities[i]` where the regions `recomputed` are run again in backward,
    and what is kept of those `offloaded`, and the optimizer's state of `state_on_host`, waits on the host.

    The table is exact: a choice costs and takes what `evaluate` says of the assignment it stands for. What is equal in
    it, such as the copies of a block, is one array.
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
    """Price everything `candidates` offers, for one training step of `training`. recomputed, offloaded,
    state_on_host: as in `Assignment`.

    MeshError if the mesh does not fit the cluster.
    """
    check_mesh(cluster, mesh.num_devices)
    few = sampled(graph, folded, (recomputed, offloaded), state_on_host)
    here = (of_graph(recomputed, few.graph), of_graph(offloaded, few.graph))
    flows = find_flows(few, folded, candidates, cluster, *here, training, state_on_host)
    nodes = price_nodes(few.graph, flows, mesh, cluster, training)
    table = CostTable(*price_edges(flows, nodes, mesh, cluster, training), memory_limit_bytes)
    return Priced(table, flows.entities, recomputed, offloaded, state_on_host)
