"""The ranks of unequal devices: what one of each group of devices sees of a plan, and which is the slowest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.costmodel.cluster.device_groups import ranks_of, seen_by
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.training import Training
from autopar.errors import MeshError
from autopar.ir.graph import Graph
from autopar.mesh import Mesh, SeenShares
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import Layout
from autopar.sbp.signature import Signature, Strategy


@dataclass(frozen=True)
class GroupView:
    """A plan's choices, mesh and cluster as the rank with the most rows of the `group` of devices sees them."""

    group: int
    mesh: Mesh
    cluster: Cluster
    assignment: Assignment
    costs: Costs


def slowest(graph: Graph, choices: Assignment, mesh: Mesh, cluster: Cluster, training: Training) -> GroupView:
    """The view of the group of devices that takes longest, which is what a step takes; the first of equals."""
    return max(seen_by_all(graph, choices, mesh, cluster, training), key=lambda one: one.costs.step_s)


def seen_by_all(
    graph: Graph, choices: Assignment, mesh: Mesh, cluster: Cluster, training: Training
) -> Iterator[GroupView]:
    """The view of each group of devices, in their order; the shares of `mesh`, if it has any, are on its first axis."""
    assert cluster.groups is not None, "a cluster of groups"
    for group in range(len(cluster.groups.members)):
        own, there = view_of(mesh, cluster, group), seen_by(cluster, group)
        here = in_shares(choices, dict(own.shares)) if own.shares else choices
        yield GroupView(group, own, there, here, evaluate(graph, here, own, there, training=training))


def view_of(mesh: Mesh, cluster: Cluster, group: int) -> Mesh:
    """`mesh` as the rank with the most rows of `group` sees it; MeshError if its first axis does not fit the groups."""
    try:
        ranks = ranks_of(cluster, mesh.shape[0])[group]
    except ValueError as error:
        raise MeshError(f"mesh {mesh}: {error}") from error
    if not mesh.shares:
        return mesh
    ((axis, rows),) = mesh.shares
    if axis:
        raise MeshError(
            f"the groups of devices lie along the first axis of mesh {mesh}, found shares on axis"
            f" {mesh.axis_names[axis]}: put that axis first"
        )
    return replace(mesh, shares=((0, SeenShares(rows, max(ranks, key=rows.__getitem__))),))


def in_shares(choices: Assignment, sizes: Mapping[int, tuple[int, ...]]) -> Assignment:
    """The same choices with the batch in shares of these sizes on each axis that has it in shares."""

    def layout(placed: Layout) -> Layout:
        return tuple(replace(one, shares=sizes[axis]) if one.shares else one for axis, one in enumerate(placed))

    def strategy(chosen: Strategy) -> Strategy:
        return Strategy(tuple(_signature(one, sizes.get(axis, ())) for axis, one in enumerate(chosen.signatures)))

    once = {id(one): one for one in choices.strategies.values()}  # copies of a block have one strategy
    strategies = {key: strategy(one) for key, one in once.items()}

    each: dict[str, Any] = {
        name: {key: layout(one) for key, one in getattr(choices, name).items()}
        for name in ("layouts", "kept", "outputs")
    }
    return replace(choices, strategies={name: strategies[id(one)] for name, one in choices.strategies.items()}, **each)


def _signature(signature: Signature, sizes: tuple[int, ...]) -> Signature:
    inputs, outputs = (
        tuple(replace(one, shares=sizes) if one.shares else one for one in side)
        for side in (signature.inputs, signature.outputs)
    )
    return replace(signature, inputs=inputs, outputs=outputs)
