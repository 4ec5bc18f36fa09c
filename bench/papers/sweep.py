"""The best plan over all meshes of so many devices, beside the best of each kind of hand plan on those meshes."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.costmodel.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.skeleton import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Mesh, as_mesh
from autopar.plan.assemble import make_plan
from autopar.plan.plan import Plan


@dataclass(frozen=True)
class ByHand:
    """One hand plan and the mesh on which it is fastest."""

    step_s: float
    memory_bytes: int
    mesh: tuple[int, ...]


@dataclass(frozen=True)
class Swept:
    """`best`: the fastest of `num_plans` plans. `by_hand`: kind -> the fastest one, within the memory limit where one of that kind is."""

    best: Plan
    by_hand: Mapping[str, ByHand]
    num_plans: int

    def fastest(self, *kinds: str) -> ByHand:
        """The fastest of these hand plans that fit."""
        return min((self.by_hand[kind] for kind in kinds), key=lambda found: (not self.fits(found), found.step_s))

    def fits(self, found: ByHand) -> bool:
        return found.memory_bytes <= self.best.memory_limit_bytes


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    """The graph of one call; traced once for all meshes."""
    return trace(skeleton(model), args, kwargs)


def mesh_shapes(num_devices: int, max_axes: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations into at most `max_axes` factors, fewest axes first.

    >>> list(mesh_shapes(4, 2))
    [(4,), (2, 2)]
    """
    if num_devices == 1:
        yield (1,)
        return
    divisors = [size for size in range(2, num_devices + 1) if num_devices % size == 0]
    for num_axes in range(1, max_axes + 1):
        yield from (shape for shape in itertools.product(divisors, repeat=num_axes) if _product(shape) == num_devices)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def sweep(
    graph: Graph, num_devices: int, cluster: Cluster, *, max_axes: int, time_limit_s: float = 30.0, optimizer: str = "adamw"
) -> Swept | InfeasibleError:
    """Plan on every mesh. If none holds the model: the error of the mesh that comes nearest."""
    plans: list[Plan] = []
    error: InfeasibleError | None = None
    for shape in mesh_shapes(num_devices, max_axes):
        try:
            plans.append(make_plan(graph, as_mesh(shape), cluster, time_limit_s=time_limit_s, optimizer=optimizer))
        except InfeasibleError as found:
            error = found
    if not plans:
        assert error is not None, "there is always a mesh"
        return error
    by_hand: dict[str, ByHand] = {}
    for plan in plans:
        for kind, costs in plan.hand.items():
            found = ByHand(costs.step_s, costs.memory_bytes, plan.mesh.shape)
            by_hand[kind] = min(by_hand.get(kind, found), found, key=lambda x: (x.memory_bytes > plan.memory_limit_bytes, x.step_s))
    return Swept(min(plans, key=lambda plan: plan.costs.step_s), by_hand, len(plans))


def shown_mesh(mesh: Mesh | tuple[int, ...]) -> str:
    """'2x4'"""
    return "x".join(map(str, mesh.shape if isinstance(mesh, Mesh) else mesh))
