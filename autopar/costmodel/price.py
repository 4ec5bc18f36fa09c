"""The search problem of a graph on a mesh: every choice and every meeting of two choices in seconds and bytes."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costmodel.collective import collective_time
from autopar.costmodel.compute import Shapes, local_shapes, shapes_time
from autopar.costmodel.conversion import Layouts, conversion_times, layout_bytes, parameter_times, same_tensor
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

PriceFlow = Callable[[Flow, Flows, Mesh, Cluster], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Priced:
    """`table.nodes[i]` prices the options of `entities[i]`.

    The table prices each reader of a value with several uses by itself: it is too high where readers of different classes share a
    conversion other than that to the kept layout, or read what was made and not what is kept; and too low by what latency buckets of
    gradients have left for want of further members. `relaxed` has the same entities and is never too high: see `_by_way`.
    """

    table: CostTable
    relaxed: CostTable
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
    shares = {flow: (count, count) for flow, count in flows.counts.items()}
    tables = (
        CostTable(*_price_flows(flows, found, nodes, mesh, cluster, price_flow), memory_limit_bytes)
        for found, price_flow in ((shares, _price_flow), (flows.relaxed, _least_price))
    )
    return Priced(*tables, flows.entities)


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


def _price_flows(
    flows: Flows, shares: Mapping[Flow, tuple[float, float]], nodes: Sequence[Node], mesh: Mesh, cluster: Cluster, price_flow: PriceFlow
) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
    """Flows between the same two entities become one edge; those of an entity with itself join its node."""
    nodes, edges = list(nodes), {}
    for flow, share in shares.items():
        cost_s, memory = (matrix * part for matrix, part in zip(price_flow(flow, flows, mesh, cluster), share))
        a, b = flow.src.node, flow.dst.node
        if a == b:
            nodes[a] = Node(nodes[a].name, nodes[a].cost_s + np.diag(cost_s), nodes[a].memory_bytes + np.diag(memory))
            continue
        if a > b:
            a, b, cost_s, memory = b, a, cost_s.T, memory.T
        edge = edges.get((a, b))
        edges[a, b] = Edge(a, b, edge.cost_s + cost_s, edge.memory_bytes + memory) if edge else Edge(a, b, cost_s, memory)
    return tuple(nodes), tuple(edges[key] for key in sorted(edges))


def _price_flow(flow: Flow, flows: Flows, mesh: Mesh, cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """f64[options of src, options of dst]: seconds of the conversion and bytes of the converted copy that backward keeps."""
    value = flows.values[flow.value]
    sources, src_index = _distinct(flows.entities[flow.src.node], flow.src)
    targets, dst_index = _distinct(flows.entities[flow.dst.node], flow.dst)
    cost_s = _times(flow, flows, sources, targets, mesh, cluster)
    memory = np.zeros((len(sources), len(targets)))
    if flow.reading.is_saved:
        memory += layout_bytes(value, targets, mesh.shape)
    if flow.reading.is_saved and flow.is_held:
        memory[same_tensor(sources, targets)] = 0.0
    spread = np.ix_(src_index, dst_index)
    return cost_s[spread], memory[spread]


def _times(flow: Flow, flows: Flows, sources: Layouts, targets: Layouts, mesh: Mesh, cluster: Cluster) -> np.ndarray:
    times = parameter_times if flow.value in flows.parameters else conversion_times
    value = flows.values[flow.value]
    return times(replace(value, needs_grad=value.needs_grad and flow.reading.gives_gradient), sources, targets, mesh.shape, cluster)


def _least_price(flow: Flow, flows: Flows, mesh: Mesh, cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """`_price_flow`, from a kept layout at the least there is."""
    cost_s, memory = _price_flow(flow, flows, mesh, cluster)
    entity = flows.entities[flow.src.node]
    if entity.kind == "kept":
        cost_s = _by_way(_times(flow, flows, entity.options, entity.options, mesh, cluster), cost_s)
    return cost_s, memory


def _by_way(first_s: np.ndarray, then_s: np.ndarray) -> np.ndarray:
    """f64[layouts, targets]: the least of `then_s` and of all detours `first_s[:, way] + then_s[way]`.

    With it `relaxed` is never too high. Let a value be made in layout P, kept in K, and read by n classes of readers in W_1 .. W_n. It
    costs c(P, K) and c(K, W) for each distinct W other than P. In `relaxed` it may be kept in P at the sum, over the readers with W_i other
    than P, of an n-th of at most c(P, K) + c(K, W_i), which is not more.
    """
    least_s = then_s.copy()
    for way in range(len(first_s)):
        np.minimum(least_s, first_s[:, way, None] + then_s[way], out=least_s)
    return least_s


def _distinct(entity: Entity, end: End) -> tuple[Layouts, np.ndarray]:
    """The layouts that the entity can give the value, and for each option which of them."""
    numbers: dict = {}
    index = [numbers.setdefault(end.layout(option), len(numbers)) for option in entity.options]
    return tuple(numbers), np.array(index, dtype=np.intp)
