"""What every option costs by itself: an op under a strategy, an input in a layout."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.costmodel.collective import collective_time
from autopar.costmodel.compute import shapes_time
from autopar.costmodel.entities import End, Flows
from autopar.costmodel.hardware import Cluster
from autopar.costmodel.inner import inner_collectives
from autopar.costmodel.memory import input_bytes, saved_by_op, update_bytes
from autopar.costmodel.offered import Offered, Stored, distinct, offered
from autopar.costmodel.training import Training
from autopar.ir.fold import Folded
from autopar.ir.graph import Graph, Input, Op, nameless
from autopar.mesh import Mesh
from autopar.sbp.local_ops import LOCAL_OPS
from autopar.sbp.placement import local_shape
from autopar.sbp.signature import Strategy
from autopar.search.table import Node

Prices = tuple[np.ndarray, np.ndarray]  # f64[options] seconds and bytes


def price_nodes(graph: Graph, folded: Folded, flows: Flows, mesh: Mesh, cluster: Cluster, training: Training) -> list[Node]:
    """A node an entity, without what flows cost; equal ones share their arrays."""
    counts = Counter(folded.representative[op.name] for op in graph.ops)
    counts.update(folded.representative[item.value.name] for item in graph.inputs)
    ops, inputs = {op.name: op for op in graph.ops}, {item.value.name: item for item in graph.inputs}
    known: dict[tuple, Prices] = {}
    nodes = []
    for number, entity in enumerate(flows.entities):
        if entity.kind == "op":
            op, count = ops[entity.name], counts[entity.name]
            key = nameless(op), id(entity.options), count
            found = known.get(key) or _times(count, _price_op(op, entity.options, _operands(op, number, flows), mesh, cluster))
        elif entity.kind == "input":
            item, count = inputs[entity.name], counts[entity.name]
            key = item.kind, replace(item.value, name=""), entity.options, count
            found = known.get(key) or _times(count, _price_input(item, entity.options, mesh, cluster, training))
        else:
            key = (len(entity.options),)
            found = known.get(key) or (np.zeros(key), np.zeros(key))
        known[key] = found
        nodes.append(Node(f"{entity.kind} {entity.name}", *found))
    return nodes


def _times(count: int, prices: Prices) -> Prices:
    return prices[0] * count, prices[1] * count


def _operands(op: Op, node: int, flows: Flows) -> tuple[list[Offered], list[Offered]]:
    """The layouts of the op's inputs and outputs; of an output that nothing reads there is no flow."""
    options = flows.entities[node].options
    ends = [End(node, port, i) for port, values in (("in", op.inputs), ("out", op.outputs)) for i in range(len(values))]
    found = [flows.offered.get(end) or offered(options, end.port, end.index) for end in ends]
    return found[: len(op.inputs)], found[len(op.inputs) :]


def _price_op(
    op: Op, strategies: Sequence[Strategy], operands: tuple[list[Offered], list[Offered]], mesh: Mesh, cluster: Cluster
) -> Prices:
    """Seconds, and bytes saved for backward without what is saved of the inputs. Strategies with the same local shapes share a price."""
    values, each = (*op.inputs, *op.outputs), (*operands[0], *operands[1])
    shapes = [[local_shape(value.shape, layout, mesh.shape) for layout in found.layouts] for value, found in zip(values, each)]
    numbers = [np.array([own.index(shape) for shape in own])[found.index] for own, found in zip(shapes, each)]
    first, index = distinct(np.stack(numbers, axis=1) if numbers else np.zeros((len(strategies), 1)))
    prices = []
    for position in first:
        local = tuple(own[row[position]] for own, row in zip(shapes, numbers))
        inputs, outputs = local[: len(op.inputs)], local[len(op.inputs) :]
        prices.append((sum(shapes_time(op, inputs, outputs, cluster)), saved_by_op(op, inputs, outputs)))
    found = np.array(prices, dtype=np.float64)[index]
    return found[:, 0] + _inner_times(op, strategies, mesh, cluster), np.ascontiguousarray(found[:, 1])


def _inner_times(op: Op, strategies: Sequence[Strategy], mesh: Mesh, cluster: Cluster) -> np.ndarray:
    """Seconds of the collectives that the op issues itself."""
    if op.target not in LOCAL_OPS:
        return np.zeros(len(strategies))
    inner = (inner_collectives(op, strategy, mesh.shape) for strategy in strategies)
    return np.array([sum(collective_time(cluster, mesh, collective) for collective in found) for found in inner])


def _price_input(item: Input, options: Sequence[Stored], mesh: Mesh, cluster: Cluster, training: Training) -> Prices:
    layouts = [option.layout for option in options]
    cost_s = [update_bytes(item, layout, mesh.shape, training) / cluster.memory_bandwidth_bytes_per_s for layout in layouts]
    memory = [sum(input_bytes(item, layout, mesh.shape, training).values()) for layout in layouts]
    return np.array(cost_s), np.array(memory, dtype=np.float64)
