"""Blocks that are run again, or whose activations wait on the host, in stages and microbatches: the same numbers to the
bit.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.costmodel.activations.autograd_footprint import regatherable
from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.trace_with_loss import traced
from autopar.mesh import as_mesh
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages
from autopar.plans.plan import Plan, plan_of
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.pipeline.trainer import pipeline_mesh
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.assignment import conversions
from tests.runtime.staged import issued_of, plan_of_sample, planned_of_rank, sample, under, with_any_layouts
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank

OPTIONS: dict[str, Any] = {"name": "gpt2", "blocks": 5, "dropout": 0.1, "batch": 32, "has_loss_fn": True}


def ways(plan: StagedPlan) -> dict[str, StagedPlan]:
    """The plan with every block of each stage kept, run again, or waiting on the host."""
    found = {kind: [] for kind in ("kept", "recomputed", "offloaded")}
    for stage in plan.stages:
        regions = recomputable(fold(stage.graph), stage.graph)
        assert len(regions) > 1
        for kind, stages in found.items():
            chosen = {name: regions if name == kind else () for name in ("recomputed", "offloaded")}
            assignment = replace(stage.assignment, **chosen)
            stages.append(plan_of(stage.graph, assignment, stage.mesh, stage.cluster, training=stage.training))
    return {kind: replace(plan, stages=tuple(stages)) for kind, stages in found.items()}


def one_step(plans: dict[str, StagedPlan]) -> dict[str, Any]:
    """Loss and this rank's gradients of a step of each, the collectives that another one issues, and the planned
    ones.
    """
    found = {}
    for kind, plan in plans.items():
        case = sample(**OPTIONS)
        model = under(plan, case)
        torch.manual_seed(3)
        loss = model.train_step(*case.args)
        numbers = {"loss": loss} | {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
        rank = pipeline_mesh(device_mesh(plan.mesh.shape, plan.mesh.axis_names))[2]
        found[kind] = numbers, issued_of(model, case), planned_of_rank(plan, rank), model.code
    return found


def gathered_again(plan: StagedPlan) -> StagedPlan:
    """The plan with any layouts, in which all parameters are gathered again in backward that can be."""
    stages = []
    for stage in with_any_layouts(plan, 1).stages:
        classes = {item.value.name: item.value.name for item in stage.graph.inputs} | {
            op.name: op.name for op in stage.graph.ops
        }
        assignment = replace(stage.assignment, regathered=regatherable(stage.graph, classes))
        stages.append(plan_of(stage.graph, assignment, stage.mesh, stage.cluster, training=stage.training))
        converted = conversions(stage.graph, assignment).values()
        assert sum(conversion.is_regathered for of_value in converted for conversion in of_value) > 4
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    ("mesh", "schedule", "is_gathered_again"),
    [
        ("pp=2,dp=2", "1f1b", False),
        ("pp=2,tp=2", "zero-bubble", False),
        ("pp=2,dp=2", "zero-bubble", True),
        ("dp=2,tp=2", None, True),
    ],
    ids=str,
)
def test_bitwise_the_same(ranks4: Ranks, mesh: str, schedule: str | None, is_gathered_again: bool) -> None:
    plan = plan_of_sample(sample(**OPTIONS), mesh, 4, schedule)
    plan = gathered_again(plan) if is_gathered_again else plan
    for found in ranks4.run(one_step, ways(plan)):
        expected = found["kept"][0]
        for kind, (numbers, issued, planned, code) in found.items():
            assert numbers.keys() == expected.keys()
            assert all(torch.equal(numbers[name], expected[name]) for name in expected), kind
            assert issued == planned, (kind, issued - planned, planned - issued)
            assert ("recomputed(" in code) == (kind == "recomputed") and ("Offload(" in code) == (kind == "offloaded")


def in_buckets(stage: Plan) -> Plan:
    """The matrices of a block that are split are gathered together, and again in backward, but no vectors, which ops
    between them read.
    """
    graph, layouts = stage.graph, stage.assignment.layouts
    matrices = [item.value.name for item in graph.of_kind("parameter") if len(item.value.shape) == 2]
    again = regatherable(graph, {name: name for name in (*layouts, *stage.assignment.strategies)})
    again = frozenset(name for name in matrices if name in again and any(p.is_split for p in layouts[name]))
    places = parameter_buckets(graph, fold(graph), 1e9)
    chosen = {name: place for name, place in places.items() if name in again}
    return changed(stage, regathered=again, parameter_buckets=chosen)


def changed(stage: Plan, **choices: Any) -> Plan:
    assignment = replace(stage.assignment, **choices)
    return plan_of(stage.graph, assignment, stage.mesh, stage.cluster, training=stage.training)


def test_buckets_gathered_again_in_a_backward_in_two_parts(ranks4: Ranks) -> None:
    case = sample(**OPTIONS)
    graph = traced(skeleton(case.model), case.loss_fn, case.args, case.kwargs)
    asked = PlanRequest(num_microbatches=4, schedule="zero-bubble")
    plan = hand_plan_in_stages("zero3", graph, as_mesh("pp=2,dp=2"), load_cluster("free-links"), asked)
    kept = replace(plan, stages=tuple(changed(stage, regathered=frozenset()) for stage in plan.stages))
    again = replace(plan, stages=tuple(in_buckets(stage) for stage in plan.stages))
    for found in ranks4.run(one_step, {"kept": kept, "again": again}):
        assert all(issued == planned for _, issued, planned, _ in found.values())
        assert "GatherBucket(" in found["again"][3] and "regathered(" not in found["kept"][3]
        torch.testing.assert_close(found["again"][0], found["kept"][0], rtol=1e-10, atol=1e-13)
