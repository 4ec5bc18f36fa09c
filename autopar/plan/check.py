"""Does a plan belong to this model and mesh, and could it run at all? Nothing the planner says is trusted here."""

from collections.abc import Iterable, Mapping

from autopar.costmodel.on_host import hostable
from autopar.costmodel.probe import regatherable
from autopar.errors import PlanError
from autopar.ir.fold import Folded
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.assignment import Assignment, uses_of
from autopar.sbp.placement import Layout, format_layout, is_even
from autopar.sbp.signature import Candidates

_AGAIN = "make the plan anew for this model and mesh"


def check_assignment(assignment: Assignment, graph: Graph, folded: Folded, candidates: Candidates, mesh: Mesh) -> None:
    """PlanError unless every op takes one of its candidates and every layout is even; names the first that does not.

    `assignment` has the names that `check_names` asks for.
    """
    for op in graph.ops:
        if assignment.strategies[op.name] not in candidates.strategies[folded.representative[op.name]]:
            raise PlanError(f"%{op.name} ({op.line}): {assignment.strategies[op.name]} is no valid strategy of {op.target}; {_AGAIN}")
    for item in graph.inputs:
        _check_offered(item.value.name, assignment.layouts[item.value.name], candidates.layouts[item.value.name])
    _check_names("output", candidates.outputs, assignment.outputs)
    for name, layout in assignment.outputs.items():
        _check_offered(name, layout, candidates.outputs[name])
    _check_kept(assignment.kept, graph, mesh)
    _check_regions(assignment, graph)
    stray = assignment.state_on_host - {item.value.name for item in hostable(graph)}
    if stray:
        raise PlanError(f"the plan keeps optimizer state of {min(stray)!r} on the host, which is no parameter that is trained; {_AGAIN}")
    unfit = assignment.regathered - regatherable(graph, {name: name for name in folded.representative})
    if unfit:
        raise PlanError(f"the plan gathers {min(unfit)!r} again in backward, which is no parameter that just one op saves; {_AGAIN}")


def check_names(assignment: Assignment, graph: Graph) -> None:
    """PlanError unless the assignment speaks of just the ops and inputs of the graph."""
    _check_names("op", (op.name for op in graph.ops), assignment.strategies)
    _check_names("input", (item.value.name for item in graph.inputs), assignment.layouts)


def _check_regions(assignment: Assignment, graph: Graph) -> None:
    """PlanError unless the regions are stretches of the graph that overlap none of their kind, the recomputed within or outside others."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    for verb, regions in (("recomputes", assignment.recomputed), ("offloads", assignment.offloaded)):
        seen: set[str] = set()
        for region in regions:
            first = position.get(region[0], 0) if region else 0
            is_stretch = region == tuple(op.name for op in graph.ops[first : first + len(region)])
            if not region or not is_stretch or seen & set(region):
                raise PlanError(f"the plan {verb} {', '.join(region) or 'nothing'}, which are no consecutive ops of their own; {_AGAIN}")
            seen |= set(region)
    offloaded = {name: number for number, region in enumerate(assignment.offloaded) for name in region}
    for region in assignment.recomputed:
        if len({offloaded.get(name) for name in region}) > 1:
            raise PlanError(f"the plan recomputes {region[0]} to {region[-1]} and offloads a part of that; expected all or none; {_AGAIN}")


def _check_names(what: str, expected: Iterable[str], found: Mapping[str, object]) -> None:
    names = set(expected)
    if missing := sorted(names - set(found)):
        raise PlanError(f"the plan says nothing about {what} {missing[0]!r} of the model; {_AGAIN}")
    if unknown := sorted(set(found) - names):
        raise PlanError(f"the plan has {what} {unknown[0]!r}, the model has not; {_AGAIN}")


def _check_offered(name: str, layout: Layout, offered: Iterable[Layout]) -> None:
    if layout not in offered:
        expected = ", ".join(map(format_layout, offered))
        raise PlanError(f"{name} cannot be in layout {format_layout(layout)}, expected one of {expected}; {_AGAIN}")


def _check_kept(kept: Mapping[str, Layout], graph: Graph, mesh: Mesh) -> None:
    values = {item.value.name: item.value for item in graph.inputs} | {v.name: v for op in graph.ops for v in op.outputs}
    used = uses_of(graph)
    for name, layout in kept.items():
        if name not in used:
            raise PlanError(f"the plan keeps {name!r}, which the model has not or never reads; {_AGAIN}")
        if len(layout) != mesh.ndim or not is_even(values[name].shape, layout, mesh.shape):
            raise PlanError(f"{values[name]} cannot be kept in layout {format_layout(layout)} on mesh {mesh}; {_AGAIN}")
