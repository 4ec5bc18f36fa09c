"""Isomorphic stages: equal up to names and with equal requests, so that
the plan of one can be renamed for the other.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.folding.match_blocks import wire
from autopar.ir.graph import Graph, Value, nameless
from autopar.planner.request import PlanRequest
from autopar.sbp.assignment import Assignment, graph_names


def wiring_of(graph: Graph) -> Any:
    """Equal for graphs of the same ops wired alike."""
    number = {item.value.name: i for i, item in enumerate(graph.inputs)}
    made = tuple(_place(graph, number, value) for value in graph.outputs)
    inputs = tuple((item.kind, replace(item.value, name="")) for item in graph.inputs)
    return tuple(map(nameless, graph.ops)), wire(graph).sources, inputs, made


def requested_of(graph: Graph, request: PlanRequest) -> Any:
    """Equal for requests that ask the same of graphs wired alike, but for what is in flight."""
    inputs = tuple(
        (request.pins.get(x.fqn), request.stored.get(x.fqn), request.crossing.get(x.value.name)) for x in graph.inputs
    )
    position = {op.name: i for i, op in enumerate(graph.ops)}
    each = (request.recomputed, request.offloaded)
    regions = tuple(tuple((position[region[0]], len(region)) for region in found) for found in each)
    sent = tuple(request.crossing.get(value.name) if isinstance(value, Value) else None for value in graph.outputs)
    return inputs, regions, sent


def _place(graph: Graph, inputs: Mapping[str, int], value: Any) -> Any:
    if not isinstance(value, Value):
        return value
    return inputs.get(value.name, (value.shape, value.dtype))


def renamed(assignment: Assignment, like: Graph, graph: Graph) -> Assignment:
    """The assignment of graph `like` for `graph`, which is the same but for names."""
    return assignment.renamed(dict(zip(graph_names(like), graph_names(graph))))
