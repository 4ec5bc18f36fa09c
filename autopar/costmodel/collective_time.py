"""The time of a collective, by the alpha-beta model on the link levels that its groups span.

Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 (ring,
pairwise exchange); NCCL's documentation of ring and double binary tree; hierarchical: reduce-scatter inside, all-reduce
across, all-gather inside, each level at its own rate. All groups of the same mesh axes run at the same time, so each
device has its fair share of a link.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.costmodel.cluster.hardware import ALGORITHMS, Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import GroupRate, group_rate
from autopar.mesh import Mesh
from autopar.sbp.redistribute import Collective


@dataclass(frozen=True, slots=True)
class GroupLevel:
    """A link level that a group spans: it joins `num_children` blocks with `num_inside` of its `num_members` each.

    `rates`: of groups by size, `base_latency_s`: fixed seconds of a collective on it.
    """

    num_children: int
    num_inside: int
    num_members: int
    latency_s: float
    bandwidth_bytes_per_s: float
    rates: tuple[GroupRate, ...] = ()
    base_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pieces:
    """The time of an algorithm: `alpha_s + beta_s_per_byte * num_bytes`."""

    alpha_s: float
    beta_s_per_byte: float

    def twice(self) -> "Pieces":
        return Pieces(2 * self.alpha_s, 2 * self.beta_s_per_byte)

    def after(self, base_s: float) -> "Pieces":
        """The pieces with `base_s` before the first hop."""
        return Pieces(base_s + self.alpha_s, self.beta_s_per_byte)


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
    return Pieces((size - 1) * max(span.latency_s for span in groups), (size - 1) / size / _flat_rate(groups))


def _hierarchical(groups: tuple[GroupLevel, ...]) -> Pieces:
    """Half a hierarchical all-reduce: a ring at each level on the result of the reduce-scatter inside it."""
    alpha = sum((span.num_children - 1) * span.latency_s for span in groups)
    beta = sum((1 - 1 / span.num_children) / span.num_inside / span.bandwidth_bytes_per_s for span in groups)
    return Pieces(alpha, beta)


def _tree(groups: tuple[GroupLevel, ...]) -> Pieces:
    """All-reduce by a pipelined double binary tree: up and down once, each byte over each link twice."""
    alpha = sum(2 * (span.num_children - 1).bit_length() * span.latency_s for span in groups)
    return Pieces(alpha, 2 / _flat_rate(groups))


def _exchange(groups: tuple[GroupLevel, ...]) -> Pieces:
    """Pairwise exchange: each device sends 1/n of its buffer to each other member, over the level that joins them."""
    size = groups[-1].num_members
    peers = [span.num_members - span.num_inside for span in groups]
    alpha = sum(count * span.latency_s for count, span in zip(peers, groups))
    return Pieces(alpha, sum(count / size / span.bandwidth_bytes_per_s for count, span in zip(peers, groups)))


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
    return tuple(_of_group(_reached(groups, kind), size, kind, allowed) for groups in spanned)


def _of_group(groups: tuple[GroupLevel, ...], size: int, kind: str, allowed: tuple[str, ...]) -> tuple[Pieces, ...]:
    bases = [span.base_latency_s for span in groups]
    if kind == "all_to_all":
        return (_exchange(groups).after(max(bases)),)
    ring, nested = _ring(groups, size), _hierarchical(groups)
    if kind == "all_reduce":  # the nested one is three collectives, of which two are inside
        nested = nested.twice().after(2 * sum(bases[:-1]) + bases[-1])
        ways = {"ring": ring.twice().after(max(bases)), "nested": nested, "tree": _tree(groups).after(max(bases))}
        return tuple(ways[name] for name in ALGORITHMS if name in allowed)
    assert kind in ("all_gather", "reduce_scatter"), f"unknown collective {kind!r}"
    halves = {"ring": ring.after(max(bases)), "nested": nested.after(sum(bases))}
    return tuple(halves[name] for name in halves if name in allowed)


def _reached(groups: tuple[GroupLevel, ...], kind: str) -> tuple[GroupLevel, ...]:
    """The levels with the bandwidth and base latency that groups reach by their rates for a kind of collective."""
    rates = (group_rate(span.rates, kind, span.num_children) for span in groups)
    return tuple(
        replace(
            span,
            bandwidth_bytes_per_s=span.bandwidth_bytes_per_s * rate.bandwidth_share,
            base_latency_s=rate.base_latency_s,
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
    copied into the bucket's tensor and out of the result.
    """
    num_members = _num_members(mesh_shape, axes)
    if num_members == 1:
        return np.zeros(np.shape(num_bytes))
    sizes = np.asarray(num_bytes, dtype=np.float64)
    times = [
        np.min([p.alpha_s * latency_share + p.beta_s_per_byte * sizes for p in choices], axis=0)
        for choices in algorithms(cluster.levels, mesh_shape, axes, kind, cluster.algorithms)
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
    what = mesh.shape, collective.axes, collective.kind, np.float64(collective.num_bytes)
    return float(collective_times(cluster, *what, latency_share=latency_share, is_copied=is_copied))
