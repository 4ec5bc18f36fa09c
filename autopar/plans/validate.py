"""Validation of a plan from a file: whether it belongs to this model and mesh and can run; nothing in it is trusted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from autopar.costmodel.activations.autograd_footprint import regatherable
from autopar.costmodel.activations.recomputable import saves
from autopar.costmodel.cluster.device_groups import cluster_of_rank
from autopar.costmodel.state_offload import hostable
from autopar.errors import PlanError
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Value
from autopar.ir.split_stages import StageGraph
from autopar.mesh import Mesh
from autopar.plans.json_fields import shown
from autopar.plans.serialise import SavedStages
from autopar.sbp.assignment import Assignment, conversions, only_gathers, produced_layouts, wanted_layout
from autopar.sbp.placement import Layout, can_be_stored, can_split, format_layout, is_convertible
from autopar.sbp.signature import Candidates
from autopar.schedule.orders import num_in_flight, num_waiting

_AGAIN = "make the plan anew for this model and mesh"


def check_assignment(assignment: Assignment, graph: Graph, folded: Folded, candidates: Candidates, mesh: Mesh) -> None:
    """PlanError unless every op has one of its candidates and every layout is even; it names the first that does not.

    `assignment` must have passed `check_names`.
    """
    for op in graph.ops:
        if assignment.strategies[op.name] not in candidates.strategies[folded.representative[op.name]]:
            raise PlanError(
                f"%{op.name} ({op.line}): {assignment.strategies[op.name]} is no valid strategy of {op.target};"
                f" {_AGAIN}"
            )
    for item in graph.inputs:
        layout = assignment.layouts[item.value.name]
        if item.kind not in ("parameter", "buffer") or not can_be_stored(item.value.shape, layout, mesh.shape):
            _check_offered(item.value.name, layout, candidates.layouts[item.value.name])
    _check_names("output", candidates.outputs, assignment.outputs)
    for name, layout in assignment.outputs.items():
        _check_offered(name, layout, candidates.outputs[name])
    _check_kept(assignment.kept, graph, mesh)
    _check_conversions(assignment, graph)
    _check_regions(assignment, graph)
    stray = assignment.state_on_host - {item.value.name for item in hostable(graph)}
    if stray:
        raise PlanError(
            f"the plan keeps optimizer state of {shown(min(stray))} on the host, which is no trained parameter;"
            f" {_AGAIN}"
        )
    _check_buckets(assignment, graph)
    if not assignment.regathered:
        return
    unfit = assignment.regathered - regatherable(graph, {name: name for name in folded.representative})
    if unfit:
        raise PlanError(
            f"the plan gathers {shown(min(unfit))} again in backward, which is no parameter that just one op saves;"
            f" {_AGAIN}"
        )


def check_names(assignment: Assignment, graph: Graph) -> None:
    """PlanError unless the assignment has exactly the ops and inputs of the graph."""
    _check_names("op", (op.name for op in graph.ops), assignment.strategies)
    _check_names("input", (item.value.name for item in graph.inputs), assignment.layouts)


def check_stages(saved: SavedStages) -> None:
    """PlanError unless each stage of the schedule has a plan, for the
    devices and the microbatches of the whole plan.
    """
    schedule, starts, parts = saved.schedule, saved.starts, saved.stages
    if not schedule.num_stages == len(starts) + 1 == len(parts):
        found = f"{len(parts)} plans of stages and {len(starts)} places to cut"
        raise PlanError(f"the plan has {found} for {schedule}, expected one plan a stage and one place fewer; {_AGAIN}")
    if len(saved.peak_bytes) not in (0, schedule.num_ranks):
        raise PlanError(
            f"the plan has {len(saved.peak_bytes)} peaks of memory for {schedule}, expected one a rank or none;"
            f" {_AGAIN}"
        )
    whole = replace(saved.training, num_microbatches=schedule.num_microbatches, num_in_flight=1, num_waiting=0)
    counts = (
        {"num_in_flight": num_in_flight(schedule, i), "num_waiting": num_waiting(schedule, i)}
        for i in range(len(parts))
    )
    of_stages = [replace(whole, **found) for found in counts]
    for what, found, expected in [
        ("it", saved.training, whole),
        *zip(range(len(parts)), (p.training for p in parts), of_stages),
    ]:
        if found != expected:
            raise PlanError(f"the plan has {schedule}: expected {expected} of stage {what}, found {found}; {_AGAIN}")
    ranks = [schedule.rank_of(number) for number in range(len(parts))]
    clusters = [cluster_of_rank(saved.cluster, rank, schedule.num_ranks) for rank in ranks]
    if clusters != [part.cluster for part in parts]:
        raise PlanError(
            f"the plan has stages on other clusters than {shown(saved.cluster.name)}, which the whole is for; {_AGAIN}"
        )


def check_crossing(stages: Sequence[StageGraph], parts: Sequence[Assignment]) -> None:
    """PlanError unless boundary tensors have one layout on both sides, and tied parameters one layout on all stages."""
    for number, (stage, sender, receiver) in enumerate(zip(stages, parts, parts[1:])):
        for name in stage.sends:
            if sender.outputs[name] != receiver.layouts[name]:
                found = (
                    f"{format_layout(sender.outputs[name])} by stage {number}, read"
                    f" {format_layout(receiver.layouts[name])} by the next"
                )
                raise PlanError(f"the plan has {name} sent {found}; expected one layout; {_AGAIN}")
    stored: dict[str, Layout] = {}
    for item, part in ((item, part) for stage, part in zip(stages, parts) for item in stage.graph.of_kind("parameter")):
        layout = part.layouts[item.value.name]
        if stored.setdefault(item.fqn, layout) != layout:
            found = f"{format_layout(stored[item.fqn])} and {format_layout(layout)}"
            raise PlanError(
                f"the plan stores {item.fqn!r}, which several stages have, as {found}; expected one layout; {_AGAIN}"
            )


def _check_regions(assignment: Assignment, graph: Graph) -> None:
    """PlanError unless the regions are runs of consecutive ops, disjoint within their kind.

    A recomputed region must lie within an offloaded one or outside all.
    """
    position = graph.position
    for verb, regions in (("recomputes", assignment.recomputed), ("offloads", assignment.offloaded)):
        seen: set[str] = set()
        for region in regions:
            first = position.get(region[0], 0) if region else 0
            is_stretch = region == tuple(op.name for op in graph.ops[first : first + len(region)])
            if not region or not is_stretch or seen & set(region):
                found = shown(", ".join(region)) if region else "nothing"
                raise PlanError(f"the plan {verb} {found}, which are no consecutive ops of their own; {_AGAIN}")
            if not any(saves(op) for op in graph.ops[first : first + len(region)]):
                raise PlanError(
                    f"the plan {verb} {region[0]} to {region[-1]}, of which backward keeps nothing; {_AGAIN}"
                )
            seen |= set(region)
    offloaded = {name: number for number, region in enumerate(assignment.offloaded) for name in region}
    for region in assignment.recomputed:
        if len({offloaded.get(name) for name in region}) > 1:
            raise PlanError(
                f"the plan recomputes {region[0]} to {region[-1]} and offloads a part of that; expected all or none;"
                f" {_AGAIN}"
            )


def _check_names(what: str, expected: Iterable[str], found: Mapping[str, object]) -> None:
    names = set(expected)
    if missing := sorted(names - set(found)):
        raise PlanError(f"the plan says nothing about {what} {missing[0]!r} of the model; {_AGAIN}")
    if unknown := sorted(set(found) - names):
        raise PlanError(f"the plan has {what} {shown(unknown[0])}, the model has not; {_AGAIN}")


def _check_offered(name: str, layout: Layout, offered: Iterable[Layout]) -> None:
    if layout not in offered:
        expected = ", ".join(map(format_layout, offered))
        raise PlanError(f"{name} cannot be in layout {format_layout(layout)}, expected one of {expected}; {_AGAIN}")


def _check_buckets(assignment: Assignment, graph: Graph) -> None:
    """PlanError unless parameter buckets have parameters that are gathered, and at least their bytes."""
    by_name = conversions(graph, assignment) if assignment.parameter_buckets else {}
    parameters = {item.value.name for item in graph.of_kind("parameter")}
    for name, place in assignment.parameter_buckets.items():
        first = by_name[name][0] if name in parameters and name in by_name else None
        if first is None or not (first.is_bucketed or only_gathers(first.src, first.dst)):
            raise PlanError(
                f"the plan has {shown(name)} in a bucket, which is no parameter to gather or reduce; {_AGAIN}"
            )
        if not first.value.num_bytes <= place.num_bytes or place.place < 0:
            raise PlanError(
                f"the plan has {shown(name)} in a bucket of {place.num_bytes} bytes, at place {place.place};"
                f" expected at least its {first.value.num_bytes} bytes and place 0; {_AGAIN}"
            )


def _check_kept(kept: Mapping[str, Layout], graph: Graph, mesh: Mesh) -> None:
    values = {item.value.name: item.value for item in graph.inputs} | {
        v.name: v for op in graph.ops for v in op.outputs
    }
    used = graph.uses
    for name, layout in kept.items():
        if name not in used:
            raise PlanError(f"the plan keeps {shown(name)}, which the model has not or never reads; {_AGAIN}")
        if not can_be_kept(values[name], layout, mesh):
            raise PlanError(f"{values[name]} cannot be kept in layout {format_layout(layout)} on mesh {mesh}; {_AGAIN}")


def _check_conversions(assignment: Assignment, graph: Graph) -> None:
    """PlanError unless each value can be converted from the layout in which it is to those in which it is read."""
    produced = produced_layouts(graph, assignment)
    for name, uses in graph.uses.items():
        kept = assignment.kept.get(name, produced[name]) if len(uses) > 1 else produced[name]
        for src, dst in ((produced[name], kept), *((kept, wanted_layout(graph, assignment, use)) for use in uses)):
            if not is_convertible(src, dst):
                raise PlanError(
                    f"the plan has {name} in layout {format_layout(src)}, which cannot be converted to"
                    f" {format_layout(dst)}; {_AGAIN}"
                )


def can_be_kept(value: Value, layout: Layout, mesh: Mesh) -> bool:
    """Whether a value with several uses can be converted to `layout` first."""
    kinds = {placement.kind for placement in layout}
    has_sum = not (("R" in kinds and not value.needs_grad) or ("P" in kinds and value.dtype == torch.bool))
    return len(layout) == mesh.ndim and can_split(value.shape, layout, mesh.shape) and has_sum
