"""The cost of activation offload: transfer time that compute does not hide, and memory that stays on the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autopar.costmodel.activations.saved_activations import NOWHERE, Regions, Saving, region_of_ops
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.roofline import shapes_time
from autopar.ir.gradients.observed_footprint import Footprint
from autopar.ir.graph import Graph, Op
from autopar.sbp.analysis.sampled_graph import Sampled


@dataclass(frozen=True, slots=True)
class Moving:
    """The cost of one byte that an offloaded region saves: seconds that forward and backward wait for its transfer.

    `share`: the part of the byte that counts as being on the device.
    """

    forward_s: float
    backward_s: float
    share: float


def movings(
    graph: Sampled,
    known: Mapping[str, Footprint],
    recomputed: Regions,
    offloaded: Regions,
    saved: Mapping[str, tuple[Saving, ...]],
    cluster: Cluster,
) -> tuple[Moving, ...]:
    """The cost for each of the `offloaded` regions, which are in graph order.

    Time: a region's bytes are copied to the host while the region and the ops behind it compute, until the next region
    needs the link. They are prefetched at the start of the next region's backward, while backward computes the next
    region and the ops between. The last region's bytes are fetched when they are needed. No second of compute hides two
    transfers. The step waits for bytes / bandwidth beyond those seconds. For each byte, this wait is the same for every
    layout that splits compute and bytes equally, so it is taken from the whole graph on one device; it is then a sum
    over ops and conversions, as a table needs.

    Memory: a region and its neighbour are on the device at a time. The two largest count, with the same shares as the
    inside of recomputed regions.
    """
    if not offloaded:
        return ()
    sizes = _sizes(graph.graph, known, recomputed, offloaded, saved)
    largest = [size == max(sizes) for size in sizes]
    num_largest = sum(graph.num(region[0]) for region, is_one in zip(offloaded, largest) if is_one)
    share = min(2, num_largest) / num_largest
    rates = _waited_for(graph, recomputed, offloaded, sizes, cluster)
    return tuple(Moving(*waited, share * is_one) for waited, is_one in zip(rates, largest))


def is_moved(op: Op, recomputed: Mapping[str, int], offloaded: Mapping[str, int]) -> bool:
    """Whether the saved results of `op` are on the host: it is in an offloaded region and in no recomputed one."""
    return op.name in offloaded and op.name not in recomputed


def _sizes(
    graph: Graph,
    known: Mapping[str, Footprint],
    recomputed: Regions,
    offloaded: Regions,
    saved: Mapping[str, tuple[Saving, ...]],
) -> list[int]:
    """Bytes that each region offloads if nothing is split."""
    places, again = region_of_ops(offloaded), region_of_ops(recomputed)
    sizes = [0] * len(offloaded)
    for op in graph.ops:
        if is_moved(op, again, places):
            kept = sum(op.outputs[index].num_bytes for index in known[op.name].saved_outputs)
            sizes[places[op.name]] += kept + known[op.name].internal_bytes
    values = {value.name: value for op in graph.ops for value in op.outputs}
    for name in saved.keys() & values.keys():
        for saving in saved[name]:
            if saving.moved_in != NOWHERE and not saving.is_source_on_host:
                sizes[saving.moved_in] += values[name].num_bytes
    return sizes


def _waited_for(
    sampled: Sampled, recomputed: Regions, offloaded: Regions, sizes: Sequence[int], cluster: Cluster
) -> Iterator[tuple[float, float]]:
    """Seconds that forward and backward wait for each byte, for each region."""
    ops = sampled.graph.ops
    position = {op.name: number for number, op in enumerate(ops)}
    begins, ends = [position[region[0]] for region in offloaded], [position[region[-1]] + 1 for region in offloaded]
    again = region_of_ops(recomputed)
    times = [shapes_time(op, _shapes(op.inputs), _shapes(op.outputs), cluster) for op in ops]
    for number, size in enumerate(sizes):
        is_last = number + 1 == len(sizes)
        num = partial(sampled.num_between, *(region[0] for region in offloaded[number : number + 2]))
        ahead = range(begins[number], len(times) if is_last else begins[number + 1])
        forward_s = sum(num(ops[at].name) * times[at][0] for at in ahead)
        behind = range(ends[number], ends[number] if is_last else ends[number + 1])
        backward_s = sum(num(ops[at].name) * (times[at][1] + times[at][0] * (ops[at].name in again)) for at in behind)
        needed_s = size * cluster.host_s_per_byte
        yield max(0.0, needed_s - forward_s) / max(size, 1), max(0.0, needed_s - backward_s) / max(size, 1)


def _shapes(values: Sequence) -> tuple[tuple[int, ...], ...]:
    return tuple(value.shape for value in values)
