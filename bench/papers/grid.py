"""Bytes that a linear layer's step moves on a grid of devices, by formula and by counting a plan's collectives.

y[m, n] = x[m, k] w[n, k]^T on p1 x p2 x p3 devices: p1 split the rows (the batch), p2 the outputs, p3 the inputs.
Forward sums y over p3, backward sums the gradient of x over p2 and that of w over p1; a device sends 2 (q - 1) / q of
the buffer in an all-reduce over q. Formula and bound: Chen et al., "AutoDDL: Automatic Distributed Deep Learning with
Near-Optimal Bandwidth Cost", arXiv:2301.06813.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.sbp.assignment import Conversion, conversions
from autopar.sbp.placement import S
from autopar.sbp.redistribute import Collective, collectives_of, redistribute
from autopar.sbp.signature import Strategy

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """x[m, k], w[n, k], y[m, n], each element `itemsize` bytes."""

    m: int
    k: int
    n: int
    itemsize: int

    def moved_bytes(self, grid: Grid) -> float:
        """Bytes a device sends in one step on `grid`."""
        p1, p2, p3 = grid
        y, dx = (p3 - 1) / p3 * self.m * self.n / (p1 * p2), (p2 - 1) / p2 * self.m * self.k / (p1 * p3)
        return 2 * self.itemsize * (y + dx + (p1 - 1) / p1 * self.k * self.n / (p2 * p3))

    def order_bytes(self, num_devices: int) -> float:
        """(mnk / p)^(2/3) elements in bytes: no schedule moves less than the order of this."""
        return self.itemsize * (self.m * self.n * self.k / num_devices) ** (2 / 3)

    def best_grid(self, num_devices: int) -> Grid:
        """The grid whose sides divide the layer's that moves least."""
        return min(self._grids(num_devices), key=self.moved_bytes)

    def _grids(self, num_devices: int) -> Iterator[Grid]:
        for p1 in range(1, num_devices + 1):
            for p2 in range(1, num_devices // p1 + 1):
                p3 = num_devices // (p1 * p2)
                if p1 * p2 * p3 == num_devices and not (self.m % p1 or self.n % p2 or self.k % p3):
                    yield p1, p2, p3


def shown(grid: Grid) -> str:
    """
    >>> shown((8, 1, 2))
    '8x1x2'
    """
    return "x".join(map(str, grid))


def linear_ops(graph: Graph) -> list[Op]:
    """The products with a weight of the model."""
    return [op for op in graph.ops if op.target == "aten.linear.default"]


def shape_of(op: Op) -> Shape:
    """Of an op of `linear_ops`; all dims but the last are rows."""
    rows, weight = op.inputs[0].shape[:-1], op.inputs[1].shape
    m = 1
    for size in rows:
        m *= size
    return Shape(m, weight[1], weight[0], op.outputs[0].dtype.itemsize)


def grid_of(op: Op, strategy: Strategy, mesh: Mesh) -> Grid:
    """The grid on which `strategy` runs a linear op; its product is less than the devices where some do the same
    work.
    """
    sides = [1, 1, 1]
    for signature, size in zip(strategy.signatures, mesh.shape):
        x, weight = signature.inputs[:2]
        if weight.is_split:
            sides[1 if weight == S(0) else 2] *= size
        elif x.is_split:
            sides[0] *= size
    return sides[0], sides[1], sides[2]


def sent_bytes(collective: Collective, mesh: Mesh) -> float:
    """Bytes a device sends in it, each part once to its next: twice in an all-reduce."""
    size = math.prod(mesh.shape[axis] for axis in collective.axes)
    return (2 if collective.kind == "all_reduce" else 1) * (size - 1) / size * collective.num_bytes


def bytes_by_layer(plan: Plan) -> dict[str, float]:
    """Linear op -> bytes a device sends for it in one step; "" for all other.

    A pending sum is its product's; any other conversion is for the products it leads to, in equal parts.
    """
    graph = plan.graph
    linear, nearest = {op.name for op in linear_ops(graph)}, _nearest_products(graph)
    found: defaultdict[str, float] = defaultdict(float)
    for name, of_value in conversions(graph, plan.assignment).items():
        for conversion in of_value:
            if sent := _sent_by(conversion, plan.mesh):
                owners = _owners(name, conversion, nearest, graph)
                for owner in owners or ("",):
                    found[owner if owner in linear else ""] += sent / max(len(owners), 1)
    counted = sum(found.values())
    # from inside ops
    found[""] += sum(sent_bytes(planned.collective, plan.mesh) for planned in plan.costs.collectives) - counted
    return dict(found)


def _sent_by(conversion: Conversion, mesh: Mesh) -> float:
    value = conversion.value
    steps = redistribute(conversion.src, conversion.dst)
    made = (
        c
        for step in steps
        for c in collectives_of(step, value.shape, value.dtype.itemsize, mesh.shape, value.needs_grad)
    )
    return sum(sent_bytes(collective, mesh) for collective in made)


def _owners(name: str, conversion: Conversion, nearest: Mapping[str, tuple[str, ...]], graph: Graph) -> tuple[str, ...]:
    users = [use.user for use in conversion.uses or graph.uses[name]]
    if any(item.value.name == name for item in graph.of_kind("parameter")):
        return tuple(users)
    producer = next((op.name for op in linear_ops(graph) if op.outputs[0].name == name), None)
    if producer is not None and any(placement.kind == "P" for placement in conversion.src):
        return (producer,)
    return tuple(dict.fromkeys(owner for user in users for owner in nearest.get(user, ())))


def _nearest_products(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Op -> the ops with a weight that the fewest steps lead to, itself if it is one."""
    uses, weights = (graph.uses, {item.value.name for item in graph.of_kind("parameter") if len(item.value.shape) > 1})
    found: dict[str, tuple[int, tuple[str, ...]]] = {}
    for op in reversed(graph.ops):
        readers = [found[use.user] for value in op.outputs for use in uses.get(value.name, ()) if use.user in found]
        least = min((depth for depth, names in readers if names), default=0)
        names = tuple(dict.fromkeys(name for depth, names in readers if depth == least for name in names))
        found[op.name] = (0, (op.name,)) if any(value.name in weights for value in op.inputs) else (least + 1, names)
    return {name: names for name, (_, names) in found.items()}
