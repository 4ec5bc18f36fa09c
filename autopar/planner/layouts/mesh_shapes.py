"""`factorise`: the meshes of a number of devices, with each axis within one link level."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from autopar.costmodel.cluster.hardware import Cluster
from autopar.errors import MeshError
from autopar.mesh import Devices, Mesh

# Letters of the axes by link level, from the inside out: devices of a node, nodes, groups of nodes.
_LETTERS = "dng"
# Tensor-parallel degrees beyond this many nodes are not tried by hand where there are stages instead.
_MOST_NODES = 2


def most_tensor(num_devices: int, cluster: Cluster) -> int:
    """The largest degree of tensor parallelism of the hand plans beside or within stages."""
    return _MOST_NODES * (cluster.levels[0].size or num_devices)


def as_used(devices: Devices, cluster: Cluster) -> Cluster:
    """`cluster` with the devices in a node that `devices` asks for; MeshError if its nodes have fewer."""
    inner = cluster.levels[0]
    if not devices.per_node or len(cluster.levels) == 1:
        return cluster
    if devices.per_node > inner.size:
        found = f"a node of cluster {cluster.name!r} has {inner.size} devices, {devices.per_node} were asked for"
        raise MeshError(f"{found}; take fewer per node, or a cluster that has them")
    return replace(cluster, levels=(replace(inner, size=devices.per_node), *cluster.levels[1:]))


def factorise(num_devices: int, cluster: Cluster, *, max_axes: int = 3) -> tuple[Mesh, ...]:
    """The meshes of up to `max_axes` axes, fewest axes first; each axis within one link level, inner levels on inner
    axes.

    An op may use several axes as one (their collectives are joint), so that a mesh has all plans of the meshes that it
    refines. The first mesh is the coarsest, with one axis for each link level. Factors of one level are in descending
    order, which does not matter to the links.

    >>> from autopar.costmodel.cluster.presets import PRESETS
    >>> [str(mesh) for mesh in factorise(32, PRESETS["h100"])]
    ['n0=4,d0=8', 'n0=4,d0=4,d1=2', 'n0=2,n1=2,d0=8']
    """
    sizes = _level_sizes(num_devices, cluster)
    meshes = [Mesh(*_axes(factors)) for factors in product(*(tuple(_splits(size, max_axes)) for size in sizes))]
    distinct = dict.fromkeys(mesh for mesh in meshes if mesh.ndim <= max(max_axes, len(sizes)))
    return tuple(sorted(distinct, key=lambda mesh: mesh.ndim))


def _level_sizes(num_devices: int, cluster: Cluster) -> tuple[int, ...]:
    """The number of devices on each link level, outermost first, without levels of one."""
    sizes, rest = [], num_devices
    for level in cluster.levels:
        size = math.gcd(rest, level.size) if level.size else rest
        sizes.append(size)
        rest //= size
    sizes[-1] *= rest  # above 1 only if the cluster is too small, which pricing refuses
    return tuple(size for size in reversed(sizes) if size > 1) or (1,)


def _splits(size: int, most: int) -> Iterator[tuple[int, ...]]:
    """The factorisations of `size` into at most `most` factors above 1, largest first, beginning with `size` itself."""
    yield (size,)
    if most == 1:
        return
    for first in range(size // 2, 1, -1):
        if size % first == 0:
            yield from ((first, *rest) for rest in _splits(size // first, most - 1) if rest[0] <= first)


def _axes(factors: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(shape, axis names) of a mesh with these `factors` of each link level, outermost first."""
    named = [
        (size, f"{_LETTERS[min(level, len(_LETTERS) - 1)]}{i}")
        for level, sizes in zip(reversed(range(len(factors))), factors)
        for i, size in enumerate(sizes)
    ]
    return tuple(size for size, _ in named), tuple(name for _, name in named)
