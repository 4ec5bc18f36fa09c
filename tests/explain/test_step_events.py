"""The timeline of a step: all that the plan has, where and when the cost model has it."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.explain.explain_plan import plan_trace
from autopar.ir.folding.fold import fold
from autopar.mesh import Mesh
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.plans.plan import Plan, plan_of
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.candidates import annotate
from tests.planner.cases import traced


def plan_with(overlap: float) -> Plan:
    graph, mesh = traced("llama"), Mesh((4,), ("dp",))
    cluster, folded = replace(load_cluster("v100-25g"), overlap=overlap), fold(graph)
    by_hand = hand_plans(graph, folded, annotate(graph, mesh, folded), mesh)["zero3"]
    places = parameter_buckets(graph, folded, 1e9, is_prefetched=overlap > 0)
    return plan_of(graph, replace(by_hand, parameter_buckets=places), mesh, cluster)


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_the_timeline_is_the_one_that_is_priced(overlap: float):
    plan = plan_with(overlap)
    events = [event for event in json.loads(plan_trace(plan))["traceEvents"] if event["ph"] == "X"]
    by_lane = defaultdict(list)
    for event in events:
        by_lane[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_lane.values():  # a lane does one thing at a time
        assert all(one[1] <= other[0] * (1 + 1e-9) + 1e-6 for one, other in pairwise(sorted(spans)))
    assert max(end for spans in by_lane.values() for _, end in spans) == pytest.approx(1e6 * plan.costs.step_s)
    compute_s = plan.costs.compute_forward_s + plan.costs.compute_backward_s + plan.costs.optimizer_s
    communication_s = plan.costs.communication_s("forward") + plan.costs.communication_s("backward")
    # the collectives of an op itself, as of a loss, are within it
    within_s = sum(each.time_s for each in plan.costs.collectives if each.where == each.users[0])
    on_compute, on_lanes = (sum(e["dur"] for e in events if bool(e["tid"]) == is_lane) for is_lane in (False, True))
    assert on_compute == pytest.approx(1e6 * (compute_s + within_s))
    assert on_lanes == pytest.approx(1e6 * (communication_s - within_s))
    assert any("gather ahead" in event["name"] for event in events) == (overlap > 0)
