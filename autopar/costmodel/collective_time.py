"""The time of a collective, by the alpha-beta model on the link levels that its groups span.

Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 (ring,
pairwise exchange); NCCL's documentation of ring and double binary tree; hierarchical: reduce-scatter inside, all-reduce
across, all-gather inside, each level at its own rate. All groups of the same mesh axes run at the same time, so each
device has its fair share of a link.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.costmodel.cluster.device_groups import ways_across
from autopar.costmodel.cluster.hardware import ALGORITHMS, Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import GroupRate, group_rate
from autopar.mesh import Mesh
from autopar.sbp.nested import Nesting
from autopar.sbp.redistribute import Collective


@dataclass(frozen=True, slots=True)
class GroupLevel:
    """A link level that a group spans: it joins `num_children` blocks with `num_inside` of its `num_members` each.

    `rates`: of groups by size, `base_latency_s`, `least_s`: of a collective on it, as of `GroupRate`.
    """

    num_children: int
    num_inside: int
    num_members: int
    latency_s: float
    bandwidth_bytes_per_s: float
    rates: tuple[GroupRate, ...] = ()
    base_latency_s: float = 0.0
    least_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pieces:
    """The time of an `algorithm`: `alpha_s + beta_s_per_byte * num_bytes`, and `least_s` at least."""

    alpha_s: float
    beta_s_per_byte: float
    algorithm: str
    least_s: float = 0.0

    def twice(self) -> "Pieces":
        return replace(self, alpha_s=2 * self.alpha_s, beta_s_per_byte=2 * self.beta_s_per_byte)

    def after(self, base_s: float, least_s: float) -> "Pieces":
        """The pieces with `base_s` before the first hop."""
        return replace(self, alpha_s=base_s + self.alpha_s, least_s=least_s)

    def seconds(self, num_bytes: np.ndarray | float, latency_share: float = 1.0) -> np.ndarray:
        """The time of so many bytes; `latency_share`: as of `collective_times`."""
        line = self.alpha_s * latency_share + self.beta_s_per_byte * num_bytes
        return np.maximum(line, self.least_s * latency_share)

    def crossings(self, other: "Pieces") -> set[float]:
        """The bytes above 0 where one of the two may become the faster one."""
        lines = [((one.alpha_s, one.beta_s_per_byte), (one.least_s, 0.0)) for one in (self, other)]
        pairs = ((own, its) for own in lines[0] for its in lines[1] if own[1] != its[1])
        return {at for own, its in pairs if (at := (own[0] - its[0]) / (its[1] - own[1])) > 0}


@lru_cache(maxsize=2**16)
def spans(
    levels: tuple[LinkLevel, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[tuple[GroupLevel, ...], ...]:
    """The link levels, from the inside out, that the groups of mesh axes `axes` span, once for all groups alike.

    Ranks are laid out row-major. All groups have the same steps from rank to rank, so that they differ only in the
    place of their first rank within its blocks.

    >>> node, network = LinkLevel(8, 1e-6, 1e11), LinkLevel(0, 1e-5, 1e10)
    >>> [[span.num_children for span in group] for group in spans((node, network), (4, 8), (0,))]  # stride 8
    [[4]]
    >>> [[span.num_children for span in group] for group in spans((node, network), (32,), (0,))]
    [[8, 4]]
    >>> [[span.num_children for span in group] for group in spans((node, network), (3, 6), (1,))]  # ranks 0 to 5, 6 ...
    [[6], [4, 2]]
    """
    num_devices, ndim = math.prod(mesh_shape), len(mesh_shape)
    ranks = np.arange(num_devices, dtype=np.int64).reshape(mesh_shape)
    members = ranks[tuple(slice(None) if axis in axes else 0 for axis in range(ndim))].ravel()
    firsts = ranks[tuple(0 if axis in axes else slice(None) for axis in range(ndim))].ravel()
    sizes = np.cumprod([level.size or num_devices for level in levels])
    places = np.unique(firsts % sizes[-2]) if len(levels) > 1 else firsts[:1]
    return tuple(dict.fromkeys(_spanned(levels, sizes, place + members) for place in places.tolist()))


def _spanned(levels: tuple[LinkLevel, ...], sizes: np.ndarray, members: np.ndarray) -> tuple[GroupLevel, ...]:
    """The levels that one group spans; `sizes`: devices in a block of each level.

    Of blocks with uneven parts the one with the most parts counts, the fullest, and the emptiest part, which has the
    least bandwidth to the others.
    """
    spanned, first, held = [], members, np.ones(len(members), dtype=np.int64)  # a rank and the members of each part
    for level, size in zip(levels, sizes.tolist()):
        _, one_of, block = np.unique(first // size, return_index=True, return_inverse=True)
        num_parts, in_block = np.bincount(block), np.bincount(block, weights=held).astype(np.int64)
        if num_parts.max() > 1:
            reach = level.latency_s, level.bandwidth_bytes_per_s, level.group_rates
            inside = int(held[(num_parts > 1)[block]].min())
            spanned.append(GroupLevel(int(num_parts.max()), inside, int(in_block.max()), *reach))
        first, held = first[one_of], in_block
    return tuple(spanned)


def _flat_rate(groups: tuple[GroupLevel, ...]) -> float:
    """Bytes/s of a ring over all members: one device of a block sends outwards at a time, with the shares of all."""
    return min(span.bandwidth_bytes_per_s * span.num_inside for span in groups)


def _ring(groups: tuple[GroupLevel, ...], size: int) -> Pieces:
    """Half a ring all-reduce: n - 1 steps, each with the latency of its slowest link."""
    return Pieces((size - 1) * max(span.latency_s for span in groups), (size - 1) / size / _flat_rate(groups), "ring")


def _nested(spanned: tuple[GroupLevel, ...], kind: str) -> Pieces:
    """Level by level, each at the rates of the collective that runs there, on what the scatters inside leave.

    An all-reduce is a reduce-scatter and an all-gather on each inner level, and an all-reduce on the outermost.
    """
    alpha = beta = least = 0.0
    for number, span in enumerate(spanned):
        is_sum = kind == "all_reduce"
        inside = ("reduce_scatter", "all_gather") if is_sum else (kind,)
        for one in inside if number < len(spanned) - 1 else (kind,):
            (reached,), times = _reached((span,), one), 2 if one == "all_reduce" else 1
            alpha += reached.base_latency_s + times * (span.num_children - 1) * span.latency_s
            least += reached.least_s
            beta += times * (1 - 1 / span.num_children) / span.num_inside / reached.bandwidth_bytes_per_s
    return Pieces(alpha, beta, "nested", least)


def _tree(groups: tuple[GroupLevel, ...]) -> Pieces:
    """All-reduce by a pipelined double binary tree: up and down once, each byte over each link twice."""
    alpha = sum(2 * (span.num_children - 1).bit_length() * span.latency_s for span in groups)
    return Pieces(alpha, 2 / _flat_rate(groups), "tree")


def _exchange(groups: tuple[GroupLevel, ...]) -> Pieces:
    """Pairwise exchange: each device sends 1/n of its buffer to each other member, over the level that joins them."""
    size = groups[-1].num_members
    peers = [span.num_members - span.num_inside for span in groups]
    alpha = sum(count * span.latency_s for count, span in zip(peers, groups))
    beta = sum(count / size / span.bandwidth_bytes_per_s for count, span in zip(peers, groups))
    return Pieces(alpha, beta, "exchange")


def _shift(groups: tuple[GroupLevel, ...]) -> Pieces:
    """Each device sends its buffer to the next of a ring: one of a block sends outwards, as in a ring's step."""
    return Pieces(max(span.latency_s for span in groups), 1 / _flat_rate(groups), "ring")


def _num_members(mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod([mesh_shape[axis] for axis in axes])


@lru_cache(maxsize=2**16)
def algorithms(
    levels: tuple[LinkLevel, ...],
    mesh_shape: tuple[int, ...],
    axes: tuple[int, ...],
    kind: str,
    allowed: tuple[str, ...] = ALGORITHMS,
) -> tuple[tuple[Pieces, ...], ...]:
    """The times of the `allowed` algorithms for collective `kind` on mesh axes with more than one device together.

    They are listed for each kind of group, of which all wait for the slowest.
    """
    size = _num_members(mesh_shape, axes)
    spanned = spans(levels, mesh_shape, axes)
    return tuple(_of_group(groups, size, kind, allowed) for groups in spanned)


def _of_group(spanned: tuple[GroupLevel, ...], size: int, kind: str, allowed: tuple[str, ...]) -> tuple[Pieces, ...]:
    groups = _reached(spanned, kind)
    fixed = max(span.base_latency_s for span in groups), max(span.least_s for span in groups)
    if kind == "all_to_all":
        return (_exchange(groups).after(*fixed),)
    if kind == "permute":
        return (_shift(groups).after(*fixed),)
    assert kind in ("all_reduce", "all_gather", "reduce_scatter"), f"unknown collective {kind!r}"
    ring = _ring(groups, size)
    ways = {"ring": ring.after(*fixed), "nested": _nested(spanned, kind)}
    if kind == "all_reduce":
        ways |= {"ring": ring.twice().after(*fixed), "tree": _tree(groups).after(*fixed)}
    return tuple(ways[name] for name in ALGORITHMS if name in allowed and name in ways)


def _reached(groups: tuple[GroupLevel, ...], kind: str) -> tuple[GroupLevel, ...]:
    """The levels with the bandwidth and base latency that groups reach by their rates for a kind of collective."""
    rates = (group_rate(span.rates, kind, span.num_children) for span in groups)
    return tuple(
        replace(
            span,
            bandwidth_bytes_per_s=span.bandwidth_bytes_per_s * rate.bandwidth_share,
            base_latency_s=rate.base_latency_s,
            least_s=rate.least_s,
        )
        for span, rate in zip(groups, rates)
    )


def collective_times(
    cluster: Cluster,
    mesh_shape: tuple[int, ...],
    axes: tuple[int, ...],
    kind: str,
    num_bytes: np.ndarray | np.float64,
    *,
    latency_share: float = 1.0,
    is_copied: bool = False,
) -> np.ndarray:
    """Seconds for each of `num_bytes` (as in `Collective`), by the best algorithm for the slowest group.

    0 on one device. `latency_share`: the share of the latency for a member of a bucket; `is_copied`: whether it is
    copied into the bucket's tensor and out of the result. Across groups of devices it is that of the slowest.
    """
    num_members = _num_members(mesh_shape, axes)
    if num_members == 1:
        return np.zeros(np.shape(num_bytes))
    if cluster.groups is not None and 0 in axes and mesh_shape[0] > 1:
        flags = {"latency_share": latency_share, "is_copied": is_copied}
        each = (
            collective_times(way, mesh_shape, axes, kind, num_bytes, **flags) for way in ways_across(cluster.groups)
        )
        return np.max(list(each), axis=0)
    sizes = np.asarray(num_bytes, dtype=np.float64)
    times = [
        np.min([way.seconds(sizes, latency_share) for way in choices], axis=0)
        for choices in algorithms(cluster.levels, mesh_shape, axes, kind, run_by(cluster, mesh_shape, axes))
    ]
    slowest = times[0] if len(times) == 1 else np.max(times, axis=0)
    times_s = slowest * cluster.kind_factors.get(kind, 1.0)
    if is_copied:  # both buffers are read and written once; the smaller has 1 / num_members of the larger's bytes
        times_s = times_s + 2 * (1 + 1 / num_members) * sizes / cluster.memory_bandwidth_bytes_per_s
    return times_s


def collective_time(
    cluster: Cluster, mesh: Mesh, collective: Collective, *, latency_share: float = 1.0, is_copied: bool = False
) -> float:
    """Seconds of one collective; arguments as of `collective_times`."""
    what = mesh.shape, collective.axes, collective.kind, collective.num_bytes
    return seconds_of(cluster, *what, latency_share, is_copied)


@lru_cache(maxsize=2**16)
def seconds_of(
    cluster: Cluster,
    mesh_shape: tuple[int, ...],
    axes: tuple[int, ...],
    kind: str,
    num_bytes: int,
    latency_share: float = 1.0,
    is_copied: bool = False,
) -> float:
    """`collective_times` of one number of bytes; plans ask for those of few, again and again."""
    flags = {"latency_share": latency_share, "is_copied": is_copied}
    return float(collective_times(cluster, mesh_shape, axes, kind, np.float64(num_bytes), **flags))


def nested_sizes(cluster: Cluster, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the blocks, from the inside out, of which the groups of `axes` consist on each of several link
    levels; () where they lie within a level, or in uneven blocks, or not all alike.
    """
    spanned = spans(cluster.levels, mesh_shape, axes)
    sizes = tuple(span.num_children for span in spanned[0])
    is_even = len(spanned) == 1 and math.prod(sizes) == _num_members(mesh_shape, axes)
    return sizes if is_even and len(sizes) > 1 else ()


def run_by(cluster: Cluster, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[str, ...]:
    """The algorithms of the cluster that its groups on `axes` can take.

    On CPUs, whose backend has flat collectives alone, the runtime runs nested ones, of even blocks (`nesting`).
    """
    if cluster.device_type != "cpu" or "ring" not in cluster.algorithms or nested_sizes(cluster, mesh_shape, axes):
        return cluster.algorithms
    return tuple(name for name in cluster.algorithms if name != "nested")


def algorithm_over_levels(cluster: Cluster, mesh: Mesh, collective: Collective) -> str:
    """The algorithm of a collective whose groups span several link levels; "" of others, and of those with one way."""
    is_within = all(len(groups) == 1 for groups in spans(cluster.levels, mesh.shape, collective.axes))
    has_one_way = collective.kind in ("all_to_all", "permute")
    return "" if is_within or has_one_way else chosen_algorithm(cluster, mesh, collective)


def chosen_algorithm(cluster: Cluster, mesh: Mesh, collective: Collective) -> str:
    """The algorithm that a collective is priced by, of the slowest group: the fastest for its bytes."""
    what = mesh.shape, collective.axes, collective.kind

    def seconds(one: Pieces) -> float:
        return float(one.seconds(collective.num_bytes))

    groups = algorithms(cluster.levels, *what, run_by(cluster, mesh.shape, collective.axes))
    return max((min(choices, key=seconds) for choices in groups), key=seconds).algorithm


def issued_as(collective: Collective, cluster: Cluster, mesh: Mesh) -> tuple[Collective, ...]:
    """The collectives that the runtime issues for one of a plan."""
    how = nesting(cluster, mesh.shape, collective.axes)
    return (collective,) if how is None else how.issued(collective)


def nesting(cluster: Cluster, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> Nesting | None:
    """How the runtime runs collectives on `axes` level by level; None where it never does."""
    sizes = nested_sizes(cluster, mesh_shape, axes) if _num_members(mesh_shape, axes) > 1 else ()
    if cluster.device_type != "cpu" or not sizes or "nested" not in cluster.algorithms:
        return None
    ranges = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        (choices,) = algorithms(cluster.levels, mesh_shape, axes, kind, cluster.algorithms)
        found = _range_of("nested", choices)
        if found is not None:
            ranges[kind] = found
    return Nesting(sizes, ranges) if ranges else None


def _range_of(name: str, choices: Sequence[Pieces]) -> tuple[float, float] | None:
    """(fewest, most) bytes for which the algorithm called `name` is faster than all others; None if it never is.

    Of several ranges that of the largest messages.
    """
    own = next(one for one in choices if one.algorithm == name)
    others = [one for one in choices if one is not own]
    edges = sorted({0.0}.union(*(one.crossings(other) for one, other in itertools.combinations(choices, 2))))
    gaps = itertools.pairwise([*edges, math.inf])
    fewest = most = None
    for low, high in gaps:
        middle = (low + high) / 2 if high < math.inf else 2 * low + 1
        if all(own.seconds(middle) < other.seconds(middle) for other in others):
            fewest, most = (low if most != low else fewest), high
    if fewest is None or most is None:
        return None
    fewest, most = math.floor(fewest) + 1 if fewest else 0.0, math.ceil(most) - 1 if most < math.inf else most
    return (fewest, most) if fewest <= most else None
