"""Isomorphic stages: equal up to names and with equal requests, so that
the plan of one can be renamed for the other.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from autopar.ir.folding.match_blocks import wire
from autopar.ir.graph import Graph, Value
from autopar.planner.request import PlanRequest
from autopar.sbp.assignment import Assignment, graph_names


def wiring_of(graph: Graph) -> Any:
    """Equal for graphs of the same ops wired alike."""
    number = {item.value.name: i for i, item in enumerate(graph.inputs)}
    made = tuple(_place(graph, number, value) for value in graph.outputs)
    inputs = tuple((item.kind, replace(item.value, name="")) for item in graph.inputs)
    return tuple(op.nameless for op in graph.ops), graph.once(wire).sources, inputs, made


def requested_of(graph: Graph, request: PlanRequest) -> Any:
    """A key that is equal for requests that ask the same of isomorphic graphs, but for what is in flight.

    It has every field of the request, those about inputs, ops or values of `graph` by position.
    """
    numbers = {name: number for number, name in enumerate(graph_names(graph))}
    of_graph = {
        "pins": tuple(request.pins.get(item.fqn) for item in graph.inputs),
        "stored": tuple(request.stored.get(item.fqn) for item in graph.inputs),
        "excluded": frozenset((numbers[name], x) for name, x in request.excluded.items() if name in numbers),
        "crossing": frozenset((numbers[name], layout) for name, layout in request.crossing.items()),
        "outputs": frozenset((numbers[name], layout) for name, layout in request.outputs.items()),
        "given": request.given.key(numbers),
        "training": replace(request.training, num_in_flight=1, num_waiting=0),
    }
    return tuple(of_graph.get(each.name, getattr(request, each.name)) for each in fields(request))


def _place(graph: Graph, inputs: Mapping[str, int], value: Any) -> Any:
    if not isinstance(value, Value):
        return value
    return inputs.get(value.name, (value.shape, value.dtype, value.stored_dtype))


def renamed(assignment: Assignment, like: Graph, graph: Graph) -> Assignment:
    """The assignment of graph `like` for `graph`, which is the same but for names."""
    return assignment if like is graph else assignment.renamed(dict(zip(graph_names(like), graph_names(graph))))
