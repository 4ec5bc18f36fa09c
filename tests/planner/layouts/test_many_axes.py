"""Meshes of four axes."""

import pytest

from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.work_bound import floor_s
from autopar.mesh import parse_mesh
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.request import PlanRequest
from autopar.plans.validate import check_assignment
from autopar.sbp.analysis.equal_runs import as_planned
from autopar.sbp.candidates import annotate
from tests.planner.cases import CPU, by_hand, folded, traced

FOUR = parse_mesh("2x2x2x2")


@pytest.fixture(scope="module")
def plan():
    return make_plan(traced("mlp"), FOUR, CPU)


def test_four_axes_are_no_worse_than_three(plan):
    coarser = (
        make_plan(traced("mlp"), parse_mesh(mesh), CPU).costs.step_s for mesh in ("4x2x2", "2x4x2", "2x2x4", "4x4")
    )
    assert floor_s(traced("mlp"), FOUR, CPU) <= plan.lower_bound_s <= plan.costs.step_s <= min(coarser) * (1 + 1e-9)


def test_a_plan_on_four_axes_is_valid(plan):
    classes = as_planned(folded("mlp"), traced("mlp"), plan.assignment)
    check_assignment(plan.assignment, traced("mlp"), classes, annotate(traced("mlp"), FOUR, classes), FOUR)
    assert plan.meshes == {str(FOUR): pytest.approx(plan.costs.step_s)}


def test_pins_hold_on_four_axes():
    pinned = make_plan(traced("mlp"), FOUR, CPU, PlanRequest(pins={"head.weight": "S(1)BS(0)B"}))
    name = next(item.value.name for item in traced("mlp").inputs if item.fqn == "head.weight")
    assert "".join(map(str, pinned.assignment.layouts[name])) == "S(1)BS(0)B"


@pytest.mark.parametrize("kind", ["ddp", "megatron"])
@pytest.mark.parametrize("name", ["mlp", "vgg13", "gpt2"])
@pytest.mark.parametrize("shape", ["1", "4", "2x2"])
def test_nothing_is_below_the_floor(name, kind, shape):
    mesh = parse_mesh(shape)
    step_s = evaluate(traced(name), by_hand(name, kind, mesh), mesh, CPU).step_s
    floor = floor_s(traced(name), mesh, CPU)
    assert floor <= step_s * (1 + 1e-9)
    if shape == "1":
        assert floor == pytest.approx(step_s, rel=1e-9)
