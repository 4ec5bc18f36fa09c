"""Edge costs of the table: those of the conversions of values between two entities, for every pair of options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.costmodel.activations.saved_activations import NOWHERE, Saving
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.conversion_cost import (
    ParameterWeights,
    Transition,
    conversion_times,
    kept_bytes,
    only_reduces_gradient,
    parameter_times,
)
from autopar.costmodel.overlap.pass_time import lane_of
from autopar.costmodel.overlap.path_weights import BothWeights, StepWeights
from autopar.costmodel.pricing.flows import Flow, Flows
from autopar.costmodel.pricing.options import Offered
from autopar.costmodel.step_cost import runs_of
from autopar.costmodel.training import Training
from autopar.costmodel.uneven_conversions import forbidden
from autopar.ir.graph import Value
from autopar.mesh import Mesh
from autopar.sbp.assignment import InBucket
from autopar.sbp.placement import Layout
from autopar.sbp.redistribute import CollectiveKind
from autopar.search.table import Edge, Node

Matrices = tuple[np.ndarray, np.ndarray]  # f64 seconds and bytes
# f64 seconds, bytes, bytes while its region is recomputed, and bytes that a microbatch offloads
Prices = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class PricedFlow:
    """The key of a flow's price: a nameless `value` converted from the layouts `src` to the layouts `dst`."""

    value: Value
    src: Offered
    dst: Offered
    saving: Saving
    is_parameter: bool
    is_stored: bool
    bucket: InBucket | None
    weights: BothWeights

    @property
    def transition(self) -> Transition:
        """The conversions between the lists of layouts at both ends."""
        return Transition(
            self.value, self.src.layouts, self.dst.layouts, self.saving, self.is_parameter, self.is_stored
        )


@dataclass(frozen=True, slots=True)
class EdgePart:
    """A flow as it occurs on an edge: `count` says how often and with what share of bytes, and from the edge's second
    node to its first if it is turned.
    """

    flow: PricedFlow
    # times, weight of the bytes inside a region, weight of offloaded bytes, seconds of waiting for each of those a step
    count: tuple[float, ...]
    is_turned: bool


def price_edges(
    flows: Flows,
    nodes: Sequence[Node],
    mesh: Mesh,
    cluster: Cluster,
    training: Training,
    buckets: Mapping[str, InBucket],
    weights: StepWeights,
) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
    """(nodes, edges) of the table: flows between two entities form one edge, those of an entity with itself join its
    node.

    Equal edges share their arrays. `buckets`: parameter -> its place in the bucket that may gather it; `weights`: of
    what both passes do.
    """
    parts = _parts(flows, buckets, weights, training.num_microbatches)
    found_flows = dict.fromkeys(part.flow for found in parts.values() for part in found)
    prices = {flow: _price(flow, mesh, cluster, training) for flow in found_flows}
    known: dict[tuple[EdgePart, ...], Matrices] = {}
    zeros: dict[tuple[int, int], np.ndarray] = {}
    nodes, edges = list(nodes), []
    for (a, b), found in sorted(parts.items(), key=lambda item: item[0]):
        if a == b:
            nodes[a] = _with_own(nodes[a], found, prices)
            continue
        if found not in known:
            known[found] = _spread(found, prices, zeros)
        edges.append(Edge(a, b, *known[found]))
    return tuple(nodes), tuple(edges)


def _parts(
    flows: Flows, buckets: Mapping[str, InBucket], weights: StepWeights, num_microbatches: int
) -> dict[tuple[int, int], tuple[EdgePart, ...]]:
    """Pair of entities -> the flows between them."""
    parts: dict[tuple[int, int], tuple[EdgePart, ...]] = {}
    runs = _last_runs(flows, weights)
    for flow, count in flows.counts.items():
        a, b = flow.src.node, flow.dst.node
        pair = min(a, b), max(a, b)
        of_run = weights.at(runs[flow.dst.node])
        numbers = (
            count.times,
            count.share,
            count.moved_share,
            num_microbatches * of_run.microbatch.others * of_run.backward.compute * count.moved_s,
        )
        parts[pair] = (*parts.get(pair, ()), EdgePart(_priced_flow(flow, flows, buckets, of_run), numbers, a > b))
    return parts


def _last_runs(flows: Flows, weights: StepWeights) -> dict[int, int]:
    """Entity -> the run behind which backward has the gradients of all that it reads."""
    runs = {
        node: weights.backward.run_of.get(entity.name, 0) if entity.kind == "op" else 0
        for node, entity in enumerate(flows.entities)
    }
    for flow in flows.counts:
        if flows.entities[flow.src.node].kind == "kept":
            runs[flow.src.node] = max(runs[flow.src.node], runs[flow.dst.node])
    return runs


def _priced_flow(flow: Flow, flows: Flows, buckets: Mapping[str, InBucket], weights: BothWeights) -> PricedFlow:
    value = flows.values[flow.value]
    value = replace(value, name="", needs_grad=value.needs_grad and flow.gives_gradient)
    ends = flows.offered[flow.src], flows.offered[flow.dst]
    kind = flow.value in flows.parameters, flows.is_stored(flow)
    place = buckets.get(flow.value) if all(kind) else None
    return PricedFlow(value, *ends, flow.saving, *kind, place and replace(place, place=0), weights)


def _price(flow: PricedFlow, mesh: Mesh, cluster: Cluster, training: Training) -> Prices:
    """f64[src.layouts, dst.layouts] each: seconds of the conversion,
    repeated as `runs_of` says, and its saved bytes.
    """
    way, pair, is_parameter = flow.transition, (flow.src.layouts, flow.dst.layouts), flow.is_parameter
    again = np.logical_and.outer(flow.src.again, flow.dst.again) & is_parameter
    is_bucketed = is_parameter and flow.is_stored
    if is_bucketed:
        again &= ~only_reduces_gradient(*pair)  # it gathers nothing in forward, so that it cannot be regathered
    kept, regathered = (
        runs_of(flow.saving, training, is_parameter=is_parameter, is_regathered=each) for each in (False, True)
    )
    cost_s, again_s = _times(flow, mesh, cluster, flow.bucket)
    if flow.saving.region != NOWHERE and flow.bucket is not None and flow.bucket.is_prefetched:
        # what is gathered again in a recomputed region is gathered there in forward, too
        inside_s = _times(flow, mesh, cluster, replace(flow.bucket, is_prefetched=False))
        cost_s, again_s = (np.where(again, *both) for both in zip(inside_s, (cost_s, again_s)))
    if is_parameter and flow.weights.microbatch.reductions != 1.0:
        once_s, _ = _times(flow, mesh, cluster, flow.bucket, flow.weights.microbatch.reductions)
        cost_s = np.where(again, cost_s, once_s)
    cost_s = cost_s + np.where(again, regathered.num_again, kept.num_again) * again_s
    num_passes = training.num_microbatches * flow.weights.microbatch.others
    num_runs = np.where(np.where(again, regathered.is_once, kept.is_once), 1, num_passes)
    cost_s = num_runs * cost_s
    if (never := forbidden(*pair)) is not None:
        cost_s = np.where(never, np.inf, cost_s)
    return cost_s, *kept_bytes(way, mesh.shape, training, again=again)


def _times(
    flow: PricedFlow, mesh: Mesh, cluster: Cluster, bucket: InBucket | None, reductions: float = 1.0
) -> Matrices:
    """f64[src.layouts, dst.layouts]: seconds of a conversion, and of a repetition in backward.

    `reductions`: the weight of its collectives in backward where all is in turn.
    """
    ends, is_stored = (flow.src.layouts, flow.dst.layouts), flow.is_parameter and flow.is_stored
    bucket = bucket if is_stored else None
    return _known_times(flow.value, ends, mesh, cluster, bucket, is_stored, flow.weights, reductions)


@lru_cache(maxsize=512)
def _known_times(
    value: Value,
    pair: tuple[tuple[Layout, ...], tuple[Layout, ...]],
    mesh: Mesh,
    cluster: Cluster,
    bucket: InBucket | None,
    is_stored: bool,  # a parameter, as it is stored
    both: BothWeights,
    reductions: float,
) -> Matrices:
    ends, forward, backward = (*pair, mesh.shape, cluster), both.forward, both.backward

    def lane(kind: CollectiveKind) -> int:
        return lane_of(cluster.levels, mesh.shape, kind.axes)

    def in_turn(kind: CollectiveKind) -> float:
        return reductions if kind.phase == "backward" else 1.0

    def put_off(kind: CollectiveKind) -> float:
        return (backward if kind.phase == "backward" else forward).put_off(lane(kind))

    def made(kind: CollectiveKind) -> float:
        return (backward if kind.phase == "backward" else forward).blocking(lane(kind))

    weights = ParameterWeights(
        made, put_off, lambda kind: backward.blocking(lane(kind)), lambda kind: backward.gathered(lane(kind))
    )
    if both.is_in_turn:
        weights = ParameterWeights(in_turn, in_turn) if reductions != 1.0 else ParameterWeights()
    if is_stored:
        times = parameter_times(value, *ends, bucket=bucket, weights=weights)
        found = times.cost_s, times.again_s
    else:
        again = conversion_times(replace(value, needs_grad=False), *ends, weigh=weights.again)
        found = conversion_times(value, *ends, weigh=weights.made), again
    for matrix in found:
        matrix.flags.writeable = False
    return found


def _matrices(part: EdgePart, prices: Mapping[PricedFlow, Prices]) -> Matrices:
    """The part's seconds and bytes for each pair of layouts."""
    cost_s, kept, inside, moved = prices[part.flow]
    times, share, moved_share, moved_s = part.count
    return times * cost_s + moved_s * moved, times * kept + share * inside + moved_share * moved


def _with_own(node: Node, parts: Sequence[EdgePart], prices: Mapping[PricedFlow, Prices]) -> Node:
    """The node with the flows from its entity to itself."""
    cost_s, memory = node.cost_s, node.memory_bytes
    for part in parts:
        at = part.flow.src.index, part.flow.dst.index
        cost_s, memory = (own + found[at] for own, found in zip((cost_s, memory), _matrices(part, prices)))
    return Node(node.name, cost_s, memory)


def _spread(
    parts: Sequence[EdgePart], prices: Mapping[PricedFlow, Prices], zeros: dict[tuple[int, int], np.ndarray]
) -> Matrices:
    """f64[options of a, options of b]: the sum over the parts; `zeros`: shape -> shared array of zeros, extended."""
    first, *others = [_spread_one(part, prices, zeros) for part in parts]
    for more in others:
        first = first[0] + more[0], first[1] + more[1]
    return first


def _spread_one(
    part: EdgePart, prices: Mapping[PricedFlow, Prices], zeros: dict[tuple[int, int], np.ndarray]
) -> Matrices:
    at = part.flow.src.index, part.flow.dst.index
    rows, columns = at[::-1] if part.is_turned else at
    shape = len(rows), len(columns)
    spread = []
    for small in _matrices(part, prices):
        if small.any():
            spread.append((small.T if part.is_turned else small)[np.ix_(rows, columns)])
        else:
            spread.append(zeros.setdefault(shape, np.zeros(shape)))
    return spread[0], spread[1]
