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

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import GroupRate, group_rate
from autopar.mesh import Mesh
from autopar.sbp.redistribute import Collective


@dataclass(frozen=True, slots=True)
class GroupLevel:
    """A link level that a group spans: it joins `num_children` blocks with `num_inside` of its members each.

    `rates`: of groups by size, `base_latency_s`: fixed seconds of a collective on it.
    """

    num_children: int
    num_inside: int
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
def spans(levels: tuple[LinkLevel, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[GroupLevel, ...]:
    """The link levels, from the inside out, that the groups of mesh axes `axes` span; ranks are laid out row-major.

    >>> node, network = LinkLevel(8, 1e-6, 1e11), LinkLevel(0, 1e-5, 1e10)
    >>> [span.num_children for span in spans((node, network), (4, 8), (0,))]  # stride 8: over the network only
    [4]
    >>> [span.num_children for span in spans((node, network), (32,), (0,))]
    [8, 4]
    >>> [span.num_children for span in spans((node, network), (4, 8), (0, 1))]
    [8, 4]
    """
    others = tuple(0 if axis not in axes else slice(None) for axis in range(len(mesh_shape)))
    members = np.arange(math.prod(mesh_shape), dtype=np.int64).reshape(mesh_shape)[others].ravel()
    levels_spanned, inside, capacity = [], 1, 1
    for level in levels:
        capacity = capacity * level.size or int(members[-1]) + 1
        block_sizes = np.unique(members // capacity, return_counts=True)[1]
        # groups that fill their blocks unevenly are priced by the fullest block
        num_children = -(-int(block_sizes.max()) // inside)
        if num_children > 1:
            reach = level.latency_s, level.bandwidth_bytes_per_s, level.group_rates
            levels_spanned.append(GroupLevel(num_children, inside, *reach))
            inside *= num_children
    return tuple(levels_spanned)


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
    size = groups[-1].num_children * groups[-1].num_inside
    peers = [(span.num_children - 1) * span.num_inside for span in groups]
    alpha = sum(count * span.latency_s for count, span in zip(peers, groups))
    return Pieces(alpha, sum(count / size / span.bandwidth_bytes_per_s for count, span in zip(peers, groups)))


def _num_members(mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod([mesh_shape[axis] for axis in axes])


@lru_cache(maxsize=2**16)
def algorithms(
    levels: tuple[LinkLevel, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...], kind: str
) -> tuple[Pieces, ...]:
    """The times of the algorithms for collective `kind` on mesh axes with more than one device together."""
    groups = _reached(spans(levels, mesh_shape, axes), kind)
    bases = [span.base_latency_s for span in groups]
    if kind == "all_to_all":
        return (_exchange(groups).after(max(bases)),)
    ring, nested = _ring(groups, _num_members(mesh_shape, axes)), _hierarchical(groups)
    if kind == "all_reduce":  # the nested one is three collectives, of which two are inside
        nested = nested.twice().after(2 * sum(bases[:-1]) + bases[-1])
        return ring.twice().after(max(bases)), nested, _tree(groups).after(max(bases))
    assert kind in ("all_gather", "reduce_scatter"), f"unknown collective {kind!r}"
    return ring.after(max(bases)), nested.after(sum(bases))


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
) -> np.ndarray:
    """Seconds for each of `num_bytes` (as in `Collective`), by the best algorithm; 0 on one device.

    `latency_share`: the share of the latency for a member of a bucket.
    """
    if _num_members(mesh_shape, axes) == 1:
        return np.zeros(np.shape(num_bytes))
    choices = algorithms(cluster.levels, mesh_shape, axes, kind)
    best = np.min(
        [p.alpha_s * latency_share + p.beta_s_per_byte * np.asarray(num_bytes, dtype=np.float64) for p in choices],
        axis=0,
    )
    return best * cluster.kind_factors.get(kind, 1.0)


def collective_time(cluster: Cluster, mesh: Mesh, collective: Collective, *, latency_share: float = 1.0) -> float:
    """Seconds of one collective."""
    num_bytes = np.float64(collective.num_bytes)
    return float(
        collective_times(cluster, mesh.shape, collective.axes, collective.kind, num_bytes, latency_share=latency_share)
    )
