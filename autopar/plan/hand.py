"""Plans as people write them by hand, as points of the space the search chooses from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from autopar.costmodel.inner import inner_collectives
from autopar.errors import PlanError
from autopar.ir.fold import Folded
from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh
from autopar.plan.complete import complete
from autopar.plan.propagate import Option, follow_batch, follow_tensors
from autopar.plan.structure import structure_of
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import I, Placement
from autopar.sbp.signature import Candidates, Signature, Strategy


@dataclass(frozen=True, slots=True)
class HandPlan:
    """Mesh axes [0, num_data_axes) split the batch, the others split tensors; `is_sharded` stores parameters in parts (ZeRO-3)."""

    num_data_axes: int
    is_sharded: bool


def parse_hand_plan(text: str, mesh: Mesh) -> HandPlan:
    """Read 'ddp', 'zero3', 'megatron' or 'megatron:dp=8,tp=8': data parallel on the outer mesh axes, tensor parallel on the inner ones.

    PlanError if the name is unknown or the degrees are no products of mesh axes.
    """
    name, _, rest = text.partition(":")
    if name in ("ddp", "zero3") and not rest:
        return HandPlan(mesh.ndim, name == "zero3")
    if name != "megatron":
        raise PlanError(f"no hand plan {text!r}; write ddp, zero3, megatron or e.g. 'megatron:dp={mesh.shape[0]},tp={mesh.shape[-1]}'")
    if not rest:
        return HandPlan(mesh.ndim - 1, False)
    try:
        degrees = {key.strip(): int(size) for key, size in (part.split("=") for part in rest.split(","))}
    except ValueError as error:
        raise PlanError(f"cannot read the degrees in {text!r}; write e.g. 'megatron:dp=8,tp=8'") from error
    return HandPlan(_num_data_axes(text, degrees, mesh), False)


def _num_data_axes(text: str, degrees: Mapping[str, int], mesh: Mesh) -> int:
    for num in range(mesh.ndim + 1):
        found = {"dp": math.prod(mesh.shape[:num]), "tp": math.prod(mesh.shape[num:])}
        if set(degrees) <= set(found) and all(found[key] == size for key, size in degrees.items()):
            return num
    raise PlanError(
        f"hand plan {text!r} does not fit mesh {mesh}: dp must be the product of its first axes and tp of the others; change one of them"
    )


def hand_plans(graph: Graph, folded: Folded, candidates: Candidates, mesh: Mesh) -> dict[str, Assignment]:
    """ddp, zero3 and megatron on this mesh, by name."""
    return {kind: hand_plan(parse_hand_plan(kind, mesh), graph, folded, candidates, mesh) for kind in ("ddp", "zero3", "megatron")}


def hand_plan(plan: HandPlan, graph: Graph, folded: Folded, candidates: Candidates, mesh: Mesh) -> Assignment:
    """The hand plan as an assignment; where an op cannot follow it, the op is whole."""
    structure = structure_of(graph)
    prefixes: dict[str, tuple[Signature, ...]] = {op.name: () for op in graph.ops}
    arguments = {item.value.name: () for item in graph.of_kind("argument")}
    for axis in range(mesh.ndim):
        options = partial(_options, axis=axis, prefixes=prefixes, folded=folded, candidates=candidates, mesh=mesh)
        if axis < plan.num_data_axes:
            batch = _place_batch(graph, candidates, arguments)
            signatures = follow_batch(graph, folded.representative, options, batch)
        else:
            batch = dict.fromkeys(arguments, I)
            signatures = follow_tensors(graph, structure, folded.representative, options)
        prefixes = {name: (*prefix, signatures[name]) for name, prefix in prefixes.items()}
        arguments = {name: (*prefix, batch[name]) for name, prefix in arguments.items()}
    strategies = {name: Strategy(prefix) for name, prefix in prefixes.items()}
    sharded_axes = tuple(range(plan.num_data_axes)) if plan.is_sharded else ()
    return complete(graph, folded, candidates, strategies, arguments, mesh, sharded_axes=sharded_axes)


def _options(
    op: Op, *, axis: int, prefixes: Mapping[str, tuple[Signature, ...]], folded: Folded, candidates: Candidates, mesh: Mesh
) -> tuple[Option, ...]:
    """What the op's strategies still allow on `axis` once `prefixes` are chosen on the axes before it."""
    found: dict[Signature, Option] = {}
    for strategy in candidates.strategies[folded.representative[op.name]]:
        signature = strategy.signatures[axis]
        if strategy.signatures[:axis] == prefixes[op.name] and signature not in found:
            found[signature] = Option(signature, _inner_bytes(op, axis, strategy, mesh))
    return tuple(found.values())


def _inner_bytes(op: Op, axis: int, strategy: Strategy, mesh: Mesh) -> int:
    return sum(c.num_bytes for c in inner_collectives(op, strategy, mesh.shape) if c.axis == axis)


def _place_batch(graph: Graph, candidates: Candidates, prefixes: Mapping[str, tuple[Placement, ...]]) -> dict[str, Placement]:
    """S(0) for every argument that has the batch as its first dim, if what `prefixes` leaves of it divides."""
    sizes = [item.value.shape[0] for item in graph.of_kind("argument") if item.value.shape]
    batch_size = max(sizes, key=sizes.count, default=0)
    placed = {}
    for item in graph.of_kind("argument"):
        name, split = item.value.name, (*prefixes[item.value.name], Placement("S", 0))
        fits = item.value.shape[:1] == (batch_size,) and any(layout[: len(split)] == split for layout in candidates.layouts[name])
        placed[name] = split[-1] if fits else I
    return placed
