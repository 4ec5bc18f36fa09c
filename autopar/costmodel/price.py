"""The search problem of a graph on a mesh: every choice and every meeting of two choices in seconds and bytes."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from autopar.costmodel.collective import collective_time
from autopar.costmodel.compute import Shapes, local_shapes, shapes_time
from autopar.costmodel.conversion import Layouts, conversion_times, layout_bytes, same_tensor
from autopar.costmodel.entities import End, Entity, Flow, Flows, find_flows
from autopar.costmodel.hardware import Cluster, check_mesh
from autopar.costmodel.inner import inner_collectives
from autopar.costmodel.memory import input_bytes, internal_bytes, update_bytes
from autopar.costmodel.probe import footprint
from autopar.ir.fold import Folded
from autopar.ir.graph import Graph, Input, Op
from autopar.mesh import Mesh
from autopar.sbp.signature import Candidates, Strategy
from autopar.search.table import CostTable, Edge, Node


@dataclass(frozen=True)
class Priced:
    """`table.nodes[i]` prices the options of `entities[i]`.

    The table is exact but for one case, where it is too high: readers of different classes that want the same layout, other than the
    kept one, of a value with several uses share one conversion at run time and are priced as two.
    """

    table: CostTable
    entities: tuple[Entity, ...]


def price(
    graph: Graph,
    folded: Folded,
    candidates: Candidates,
    mesh: Mesh,
    cluster: Cluster,
    *,
    optimizer: str = "adamw",
    memory_limit_bytes: float = math.inf,
) -> Priced:
    """Price everything `candidates` offers, for one training step with `optimizer` (see `memory.OPTIMIZER_STATE_BYTES`).

    MeshError if the mesh does not fit the cluster; ValueError for an unknown optimizer.
    """
    check_mesh(cluster, mesh.num_devices)
    flows = find_flows(graph, folded, candidates)
    nodes = _price_nodes(graph, folded, flows.entities, mesh, cluster, optimizer)
    nodes, edges = _price_flows(flows, nodes, mesh, cluster)
    return Priced(CostTable(tuple(nodes), tuple(edges), memory_limit_bytes), flows.entities)


def _price_nodes(graph: Graph, folded: Folded, entities: tuple[Entity, ...], mesh: Mesh, cluster: Cluster, optimizer: str) -> list[Node]:
    counts = Counter(folded.representative[op.name] for op in graph.ops)
    counts.update(folded.representative[item.value.name] for item in graph.inputs)
    ops, inputs = {op.name: op for op in graph.ops}, {item.value.name: item for item in graph.inputs}
    nodes = []
    for entity in entities:
        cost_s, memory = np.zeros(len(entity.options)), np.zeros(len(entity.options))
        if entity.kind == "op":
            cost_s, memory = _price_op(ops[entity.name], entity.options, mesh, cluster)
        elif entity.kind == "input":
            cost_s, memory = _price_input(inputs[entity.name], entity.options, mesh, cluster, optimizer)
        count = counts[entity.name] if entity.kind in ("op", "input") else 1
        nodes.append(Node(f"{entity.kind} {entity.name}", cost_s * count, memory * count))
    return nodes


def _price_op(op: Op, strategies: tuple[Strategy, ...], mesh: Mesh, cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """f64[strategies] seconds and bytes saved for backward by one op, without what it saves of its inputs."""
    known: dict[tuple[Shapes, Shapes], tuple[float, float]] = {}
    cost_s, memory = np.zeros(len(strategies)), np.zeros(len(strategies))
    for position, strategy in enumerate(strategies):
        shapes = local_shapes(op, strategy, mesh.shape)
        if shapes not in known:
            known[shapes] = sum(shapes_time(op, *shapes, cluster)), saved_by_op(op, *shapes)
        cost_s[position], memory[position] = known[shapes]
        cost_s[position] += sum(collective_time(cluster, mesh, found) for found in inner_collectives(op, strategy, mesh.shape))
    return cost_s, memory


def saved_by_op(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    """Bytes of results and internal tensors that `op` keeps for backward on these local shapes."""
    kept = sum(math.prod(outputs[index]) * op.outputs[index].dtype.itemsize for index in sorted(footprint(op).saved_outputs))
    return kept + internal_bytes(op, inputs)


def _price_input(item: Input, layouts: Layouts, mesh: Mesh, cluster: Cluster, optimizer: str) -> tuple[np.ndarray, np.ndarray]:
    cost_s = [update_bytes(item, layout, mesh.shape, optimizer) / cluster.memory_bandwidth_bytes_per_s for layout in layouts]
    memory = [sum(input_bytes(item, layout, mesh.shape, optimizer).values()) for layout in layouts]
    return np.array(cost_s), np.array(memory, dtype=np.float64)


def _price_flows(flows: Flows, nodes: list[Node], mesh: Mesh, cluster: Cluster) -> tuple[list[Node], list[Edge]]:
    """Flows between the same two entities become one edge; those of an entity with itself join its node."""
    nodes, edges = list(nodes), {}
    for flow, count in flows.counts.items():
        cost_s, memory = (count * matrix for matrix in _price_flow(flow, flows, mesh, cluster))
        a, b = flow.src.node, flow.dst.node
        if a == b:
            nodes[a] = Node(nodes[a].name, nodes[a].cost_s + np.diag(cost_s), nodes[a].memory_bytes + np.diag(memory))
            continue
        if a > b:
            a, b, cost_s, memory = b, a, cost_s.T, memory.T
        edge = edges.get((a, b))
        edges[a, b] = Edge(a, b, edge.cost_s + cost_s, edge.memory_bytes + memory) if edge else Edge(a, b, cost_s, memory)
    return nodes, [edges[key] for key in sorted(edges)]


def _price_flow(flow: Flow, flows: Flows, mesh: Mesh, cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """f64[options of src, options of dst]: seconds of the conversion and bytes of the converted copy that backward keeps."""
    value = flows.values[flow.value]
    sources, src_index = _distinct(flows.entities[flow.src.node], flow.src)
    targets, dst_index = _distinct(flows.entities[flow.dst.node], flow.dst)
    cost_s = conversion_times(value, sources, targets, mesh.shape, cluster)
    memory = np.zeros((len(sources), len(targets)))
    if flow.is_saved:
        memory += layout_bytes(value, targets, mesh.shape)
    if flow.is_saved and flow.is_held:
        memory[same_tensor(sources, targets)] = 0.0
    spread = np.ix_(src_index, dst_index)
    return cost_s[spread], memory[spread]


def _distinct(entity: Entity, end: End) -> tuple[Layouts, np.ndarray]:
    """The layouts that the entity can give the value, and for each option which of them."""
    numbers: dict = {}
    index = [numbers.setdefault(end.layout(option), len(numbers)) for option in entity.options]
    return tuple(numbers), np.array(index, dtype=np.intp)
