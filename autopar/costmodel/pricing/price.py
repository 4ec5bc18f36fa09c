"""`price`: the cost table of a graph on a mesh, with the seconds and
bytes of every option and of every pair of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costmodel.cluster.hardware import Cluster, check_mesh
from autopar.costmodel.overlap.path_weights import IN_TURN, StepWeights
from autopar.costmodel.pricing.flows import Entity, find_flows
from autopar.costmodel.pricing.price_edges import price_edges
from autopar.costmodel.pricing.price_nodes import price_nodes
from autopar.costmodel.pricing.priced_buckets import priced_buckets
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.analysis.sampled_graph import of_graph, sampled
from autopar.sbp.assignment import NO_CHOICES, Assignment, InBucket
from autopar.sbp.signature import Candidates
from autopar.search.table import CostTable


@dataclass(frozen=True)
class PricedStep:
    """The training step that a table prices.

    `given`: the choices that the table leaves no options for, such as the recomputed regions. `weights`: of paths
    through both passes; by default all is done in turn.
    """

    training: Training = WHOLE_BATCH
    given: Assignment = NO_CHOICES
    weights: StepWeights = IN_TURN


WHOLE_STEP = PricedStep()


@dataclass(frozen=True)
class Priced:
    """A cost table with its entities: `table.nodes[i]` prices the options of `entities[i]`.

    `given`: the choices of the step. `parameter_buckets`: those in which the table prices each parameter, where this is
    faster than by itself. The table is exact: the cost and memory of a choice equal those of `evaluate` for its
    assignment. Equal entries, such as those of a block's copies, are one array.
    """

    table: CostTable
    entities: tuple[Entity, ...]
    mesh: Mesh
    cluster: Cluster
    given: Assignment = NO_CHOICES
    parameter_buckets: Mapping[str, InBucket] = field(default_factory=dict)


def price(
    graph: Graph,
    folded: Folded,
    candidates: Candidates,
    mesh: Mesh,
    cluster: Cluster,
    step: PricedStep = WHOLE_STEP,
    *,
    memory_limit_bytes: float = math.inf,
) -> Priced:
    """Price everything `candidates` offers in a step; `memory_limit_bytes`: of a device.

    MeshError if the mesh does not fit the cluster.
    """
    training, given, weights = step.training, step.given, step.weights
    check_mesh(cluster, mesh.num_devices)
    few = sampled(graph, folded, (given.recomputed, given.offloaded), given.state_on_host)
    here = (of_graph(given.recomputed, few.graph), of_graph(given.offloaded, few.graph))
    places = priced_buckets(graph, folded, mesh, cluster, training, min(memory_limit_bytes, cluster.memory_bytes))
    flows = find_flows(few, folded, candidates, cluster, *here, training, given.state_on_host)
    nodes = price_nodes(few.graph, flows, mesh, cluster, training, weights)
    table = CostTable(*price_edges(flows, nodes, mesh, cluster, training, places, weights), memory_limit_bytes)
    return Priced(table, flows.entities, mesh, cluster, given, places)
