"""What every pair of choices costs together: the conversions of the values that go from one to the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costmodel.conversion import conversion_times, copy_bytes, parameter_times
from autopar.costmodel.entities import Flow, Flows
from autopar.costmodel.hardware import Cluster
from autopar.costmodel.offered import Offered
from autopar.ir.graph import Value
from autopar.mesh import Mesh
from autopar.search.table import Edge, Node

Matrices = tuple[np.ndarray, np.ndarray]  # f64 seconds and bytes


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the price of a flow depends on: nameless `value` goes from the layouts `src` to the layouts `dst`."""

    value: Value
    src: Offered
    dst: Offered
    is_saved: bool
    is_held: bool
    is_bucketed: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A meeting as it occurs on an edge: `count` times, and from the edge's second node to its first if it is turned."""

    meeting: Meeting
    count: int
    is_turned: bool


def price_edges(flows: Flows, nodes: Sequence[Node], mesh: Mesh, cluster: Cluster) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
    """Flows between the same two entities become one edge; those of an entity with itself join its node. Equal ones share their arrays."""
    parts = _parts(flows)
    meetings = dict.fromkeys(part.meeting for found in parts.values() for part in found)
    prices = {meeting: _price(meeting, mesh, cluster) for meeting in meetings}
    known: dict[tuple[Part, ...], Matrices] = {}
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


def _parts(flows: Flows) -> dict[tuple[int, int], tuple[Part, ...]]:
    """Pair of entities -> the flows between them."""
    found: dict[tuple[int, int], tuple[Part, ...]] = {}
    for flow, count in flows.counts.items():
        a, b = flow.src.node, flow.dst.node
        pair = min(a, b), max(a, b)
        found[pair] = (*found.get(pair, ()), Part(_meeting(flow, flows), count, a > b))
    return found


def _meeting(flow: Flow, flows: Flows) -> Meeting:
    value = flows.values[flow.value]
    value = replace(value, name="", needs_grad=value.needs_grad and flow.reading.gives_gradient)
    ends = flows.offered[flow.src], flows.offered[flow.dst]
    return Meeting(value, *ends, flow.reading.is_saved, flow.is_held, flows.is_bucketed(flow))


def _price(meeting: Meeting, mesh: Mesh, cluster: Cluster) -> Matrices:
    """f64[src.layouts, dst.layouts]: seconds of the conversion and bytes of the converted copy that backward keeps."""
    pair = meeting.src.layouts, meeting.dst.layouts
    times = parameter_times if meeting.is_bucketed else conversion_times
    cost_s = times(meeting.value, *pair, mesh.shape, cluster)
    if not meeting.is_saved:
        return cost_s, np.zeros_like(cost_s)
    memory = copy_bytes(meeting.value, *pair, mesh.shape, is_held=meeting.is_held)
    again = np.logical_and.outer(meeting.src.again, meeting.dst.again)
    if again.any():
        cost_s = cost_s + np.where(again, conversion_times(replace(meeting.value, needs_grad=False), *pair, mesh.shape, cluster), 0.0)
    return cost_s, np.where(again, 0.0, memory)


def _with_own(node: Node, parts: Sequence[Part], prices: Mapping[Meeting, Matrices]) -> Node:
    """The node with the flows from its entity to itself."""
    cost_s, memory = node.cost_s, node.memory_bytes
    for part in parts:
        at = part.meeting.src.index, part.meeting.dst.index
        cost_s, memory = (own + part.count * found[at] for own, found in zip((cost_s, memory), prices[part.meeting]))
    return Node(node.name, cost_s, memory)


def _spread(parts: Sequence[Part], prices: Mapping[Meeting, Matrices], zeros: dict[tuple[int, int], np.ndarray]) -> Matrices:
    """f64[options of a, options of b]: the sum over the parts. `zeros`: those already made, for matrices of nothing else."""
    first, *others = [_spread_one(part, prices, zeros) for part in parts]
    for more in others:
        first = first[0] + more[0], first[1] + more[1]
    return first


def _spread_one(part: Part, prices: Mapping[Meeting, Matrices], zeros: dict[tuple[int, int], np.ndarray]) -> Matrices:
    at = part.meeting.src.index, part.meeting.dst.index
    rows, columns = at[::-1] if part.is_turned else at
    shape = len(rows), len(columns)
    found = []
    for small in prices[part.meeting]:
        if small.any():
            small = part.count * (small.T if part.is_turned else small)
            found.append(small[np.ix_(rows, columns)])
        else:
            found.append(zeros.setdefault(shape, np.zeros(shape)))
    return found[0], found[1]
