"""Node costs of the table: those of an op under a strategy and of an input in a layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.costmodel.activations.transients import transient_bytes
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.collective_time import collective_time
from autopar.costmodel.inner_collectives import inner_collectives
from autopar.costmodel.memory import input_bytes, input_update_s, saved_by_op, waiting_bytes
from autopar.costmodel.overlap.path_weights import BothWeights, StepWeights
from autopar.costmodel.pricing.flows import Count, Flows
from autopar.costmodel.pricing.options import Stored, distinct, offered
from autopar.costmodel.roofline import shapes_time, splitting_s, weight_share
from autopar.costmodel.state_offload import moving_s, optimizer_bytes
from autopar.costmodel.training import Training
from autopar.ir.graph import Graph, Input, Op
from autopar.mesh import Mesh
from autopar.sbp.local_ops import local_op
from autopar.sbp.placement import local_shape
from autopar.sbp.signature import Strategy
from autopar.search.table import Node

Prices = tuple[np.ndarray, np.ndarray]  # f64[options] seconds and bytes
Shape = tuple[int, ...]


def price_nodes(
    graph: Graph, flows: Flows, mesh: Mesh, cluster: Cluster, training: Training, weights: StepWeights
) -> list[Node]:
    """A node for each entity, without the costs of flows; equal nodes share their arrays.

    `weights`: of what both passes do.
    """
    ops, inputs = {op.name: op for op in graph.ops}, {item.value.name: item for item in graph.inputs}
    known: dict[tuple, Prices] = {}
    nodes = []
    for entity in flows.entities:
        options: Any = entity.options
        if entity.kind == "op":
            op, count = ops[entity.name], flows.members[entity.name]
            of_run = weights.of(op.name)
            key = op.nameless, id(entity.options), count.numbers, of_run
            if key not in known:
                each = _price_op(op.nameless, options, mesh, cluster, is_split=training.num_waiting > 0)
                transient = _transients(op, options, mesh, flows.parameters) if count.transient_share else 0.0
                known[key] = _summed(each, transient, count, training, of_run, weight_share(op))
            node = known[key]
        elif entity.kind == "input":
            item, count = inputs[entity.name], flows.members[entity.name]
            key = item.kind, replace(item.value, name=""), entity.options, count.numbers
            node = known.get(key) or _price_inputs(item, count, options, mesh, cluster, training)
        else:
            key = (len(entity.options),)
            node = known.get(key) or (np.zeros(key), np.zeros(key))
        known[key] = node
        nodes.append(Node(f"{entity.kind} {entity.name}", *node))
    return nodes


def _summed(
    each: np.ndarray,
    transient: np.ndarray | float,
    count: Count,
    training: Training,
    weights: BothWeights,
    weight_share: float,
) -> Prices:
    """The costs of a class of ops, from those of one op, its `transient` and their multiplicities.

    `weights`: of its run; `weight_share`: of its backward.

    Ops in a recomputed region run forward twice, and their saved tensors exist only while it is recomputed; those of
    other ops may be on the host.
    """
    forward_s, backward_s, saved, waiting = each.T
    ahead, back = weights.forward.compute, weights.backward.compute
    times_s = (ahead * count.times + back * count.num_inside) * forward_s + back * count.times * backward_s
    times_s = times_s + back * count.moved_s * saved
    each_s = weights.microbatch.others * times_s
    if weights.microbatch.weight_gradients != weights.microbatch.others:
        lighter = weights.microbatch.weight_gradients - weights.microbatch.others
        each_s = each_s + lighter * weight_share * back * count.times * backward_s
    kept = training.num_in_flight * (count.times - count.num_inside - count.num_moved) + count.share + count.moved_share
    held = kept * saved + training.num_waiting * count.times * waiting + count.transient_share * transient
    return training.num_microbatches * each_s, np.ascontiguousarray(held)


@dataclass(frozen=True, eq=False)
class _LocalShapes:
    """The local shapes of an op's inputs and outputs under its strategies.

    `shapes`: of each value, the possible ones. `numbers`: of each value, i64[strategies], positions in these.
    """

    num_inputs: int
    shapes: list[list[Shape]]
    numbers: list[np.ndarray]

    @classmethod
    def of(cls, op: Op, strategies: tuple[Strategy, ...], mesh_shape: Shape) -> "_LocalShapes":
        places = (("in", op.inputs), ("out", op.outputs))
        each = [(x, offered(strategies, port, i)) for port, values in places for i, x in enumerate(values)]
        shapes = [[local_shape(x.shape, layout, mesh_shape) for layout in found.layouts] for x, found in each]
        numbers = [np.array([own.index(x) for x in own])[found.index] for own, (_, found) in zip(shapes, each)]
        return cls(len(op.inputs), shapes, numbers)

    def at(self, position: int) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """The shapes of inputs and outputs under a strategy."""
        local = tuple(own[row[position]] for own, row in zip(self.shapes, self.numbers))
        return local[: self.num_inputs], local[self.num_inputs :]


@lru_cache(maxsize=1024)
def _price_op(op: Op, strategies: tuple[Strategy, ...], mesh: Mesh, cluster: Cluster, *, is_split: bool) -> np.ndarray:
    """f64[strategies, 4]: seconds of forward and of backward, in two parts if it `is_split`; bytes saved beyond inputs,
    and of put-off gradients.

    Strategies with the same local shapes and roles share a price.
    """
    local = _LocalShapes.of(op, strategies, mesh.shape)
    first, index = distinct(np.stack([*local.numbers, _roles(op, strategies)], axis=1))
    prices = []
    for position in first:
        inputs, outputs = local.at(position)
        kept = saved_by_op(op, strategies[position], inputs, outputs, mesh.shape), waiting_bytes(op, outputs)
        forward_s, backward_s = shapes_time(op, inputs, outputs, cluster)
        backward_s += splitting_s(op, inputs, outputs, cluster) if is_split else 0.0
        prices.append((forward_s, backward_s, *kept))
    found = np.array(prices, dtype=np.float64)[index]
    if local_op(op.target) is not None:
        found[:, :2] += _inner_times(op, strategies, mesh, cluster)
    found.flags.writeable = False
    return found


def _transients(op: Op, strategies: tuple[Strategy, ...], mesh: Mesh, parameters: frozenset[str]) -> np.ndarray:
    """f64[strategies]: bytes of the op's transient."""
    local = _LocalShapes.of(op, strategies, mesh.shape)
    first, index = distinct(np.stack(local.numbers, axis=1))
    return np.array([transient_bytes(op, *local.at(x), parameters) for x in first], dtype=np.float64)[index]


def _roles(op: Op, strategies: Sequence[Strategy]) -> np.ndarray:
    """i64[strategies], equal for strategies whose axes take the same roles."""
    if local_op(op.target) is None:
        return np.zeros(len(strategies), dtype=np.int64)
    numbers: dict[tuple[str, ...], int] = {}
    taken = (tuple(signature.role for signature in strategy.signatures) for strategy in strategies)
    return np.array([numbers.setdefault(roles, len(numbers)) for roles in taken], dtype=np.int64)


def _inner_times(op: Op, strategies: Sequence[Strategy], mesh: Mesh, cluster: Cluster) -> np.ndarray:
    """f64[strategies, 2]: seconds of the op's inner collectives in forward and in backward."""
    times = np.zeros((len(strategies), 2))
    for row, strategy in zip(times, strategies):
        for collective in inner_collectives(op, strategy, mesh.shape):
            row[int(collective.phase == "backward")] += collective_time(cluster, mesh, collective)
    return times


def _price_inputs(
    item: Input, count: Count, options: Sequence[Stored], mesh: Mesh, cluster: Cluster, training: Training
) -> Prices:
    """The costs of a class of inputs, of which some may have optimizer state on the host."""
    layouts = [option.layout for option in options]
    cost_s = [input_update_s(item, layout, mesh.shape, training, cluster) for layout in layouts]
    kinds = [input_bytes(item, layout, mesh.shape, training) for layout in layouts]
    memory = [count.times * sum(found.values()) - count.num_pending * found.get("gradients", 0) for found in kinds]
    prices = count.times * np.array(cost_s), np.array(memory, dtype=np.float64)
    if not count.num_on_host:
        return prices
    state = np.array([optimizer_bytes(item, layout, mesh.shape, training) for layout in layouts], dtype=np.float64)
    return (
        prices[0] + count.num_on_host * moving_s(1.0, cluster) * state,
        prices[1] + (count.brought_share - count.num_on_host) * state,
    )
