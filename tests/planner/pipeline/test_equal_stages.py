"""Requests of isomorphic stages: equal if they ask the same, whatever the stages are called."""

from dataclasses import fields, replace

import pytest

from autopar.costmodel.training import Training
from autopar.ir.graph import Graph, Op
from autopar.planner.pipeline.equal_stages import requested_of
from autopar.planner.request import ANYTHING, PlanRequest
from autopar.sbp.assignment import NO_CHOICES
from autopar.sbp.placement import S
from tests.costmodel.build import layer_stack

GRAPH = layer_stack(2)
PARAMETER = GRAPH.of_kind("parameter")[0]
# A value of each field that is not its default.
OTHERS = {
    "pins": {PARAMETER.fqn: "S(0)"},
    "stored": {PARAMETER.fqn: "S(0)"},
    "excluded": {GRAPH.ops[0].name: ("R -> R",)},
    "memory_limit_bytes": 1e9,
    "memory_share": 0.5,
    "any_order": True,
    "training": Training("sgd"),
    "time_limit_s": 1.0,
    "num_microbatches": 2,
    "schedule": "1f1b",
    "trains": False,
    "crossing": {GRAPH.ops[-1].outputs[0].name: (S(0),)},
    "outputs": {GRAPH.ops[-1].outputs[0].name: (S(0),)},
    "unknown_ops": "whole",
    "shares": (("dp", (3, 1)),),
    "given": replace(NO_CHOICES, recomputed=((GRAPH.ops[0].name,),)),
}


@pytest.mark.parametrize("name", [each.name for each in fields(PlanRequest)])
def test_requests_that_differ_in_any_field_are_not_equal(name: str) -> None:
    assert requested_of(GRAPH, replace(ANYTHING, **{name: OTHERS[name]})) != requested_of(GRAPH, ANYTHING)


def test_what_is_in_flight_does_not_count() -> None:
    few, many = (replace(ANYTHING, training=Training("sgd", 4, count, count)) for count in (1, 3))
    assert requested_of(GRAPH, few) == requested_of(GRAPH, many)


def test_names_do_not_count() -> None:
    here, there = (replace(GRAPH, ops=_named(GRAPH, prefix)) for prefix in ("here", "there"))
    asked = [
        requested_of(graph, replace(ANYTHING, given=replace(NO_CHOICES, recomputed=((graph.ops[number].name,),))))
        for graph, number in ((here, 0), (there, 0), (here, 1))
    ]
    assert asked[0] == asked[1] != asked[2]


def _named(graph: Graph, prefix: str) -> tuple[Op, ...]:
    return tuple(replace(op, name=f"{prefix}_{op.name}") for op in graph.ops)
