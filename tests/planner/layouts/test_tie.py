"""Plans that prices cannot tell apart: less communication is taken, and said; presets have no ties."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from autopar.costmodel.cluster.hardware import LinkLevel
from autopar.costmodel.cluster.measured_terms import Calibration
from autopar.costmodel.evaluate import evaluate
from autopar.mesh import Devices
from autopar.planner.choose import choose_plan
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.planner.layouts.search_meshes import make_plan
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from tests.planner.cases import CPU, MESH, annotated, folded, traced

NAME = "gpt2"
FAST = replace(CPU, levels=(LinkLevel(0, 1e-6, 2e10),))  # so that the fastest plan communicates much


def with_error(fit_error: float, cluster=FAST):
    return replace(cluster, calibration=Calibration("2026-01-01", "gloo", fit_error, 2 * fit_error, num_ranks=4))


def communication_s(costs) -> float:
    return costs.communication_s("forward") + costs.communication_s("backward")


def test_without_an_error_there_is_no_tie():
    assert make_plan(traced(NAME), MESH, with_error(0.0)).assignment == make_plan(traced(NAME), MESH, FAST).assignment
    assert "tie" not in make_plan(traced(NAME), MESH, FAST).found_by


@pytest.mark.parametrize("fit_error", [0.02, 0.3, 2.0])
def test_of_plans_within_the_error_the_one_with_less_communication_is_taken(fit_error):
    cluster = with_error(fit_error)
    fastest, plan = make_plan(traced(NAME), MESH, FAST), make_plan(traced(NAME), MESH, cluster)
    assert plan.step_s <= (1 + fit_error) * fastest.step_s * (1 + 1e-9)
    by_hand = hand_plans(traced(NAME), folded(NAME), annotated(NAME), MESH)
    priced = [evaluate(traced(NAME), each, MESH, cluster) for each in by_hand.values()]
    tied = [communication_s(costs) for costs in priced if costs.step_s <= (1 + fit_error) * fastest.step_s]
    least = min([communication_s(fastest.costs), *tied])
    assert communication_s(plan.costs) == pytest.approx(least, rel=1e-9)
    assert 0 < plan.lower_bound_s <= plan.step_s
    is_tie = least < communication_s(fastest.costs) * (1 - 1e-9)
    assert ("a tie: " in plan.found_by) == is_tie == ("a tie: " in plan.explain())


def test_a_wide_error_makes_a_tie():
    plan = make_plan(traced(NAME), MESH, with_error(2.0))
    assert "within the fit's error of 200.0%" in plan.found_by and plan.found_by.startswith("hand plan ")
    assert Plan.loads(plan.dumps(), traced(NAME), MESH, is_own=True).found_by == plan.found_by


def test_meshes_tie_too():
    fastest = make_plan(traced(NAME), Devices(4), FAST)
    plan = make_plan(traced(NAME), Devices(4), with_error(1.0))
    assert communication_s(plan.costs) <= communication_s(fastest.costs)
    assert plan.step_s <= 2 * fastest.step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("age", "told"),
    [
        (timedelta(days=3, hours=1), "3 days ago"),
        (timedelta(hours=1.5), "1 hour ago"),
        (timedelta(0), "just now"),
        (timedelta(days=-2), "dated in the future"),
    ],
)
def test_explain_says_how_old_a_calibration_is_and_how_far_off(age, told):
    origin = Calibration((datetime.now(UTC) - age).isoformat(), "gloo", 0.051, 0.2, num_ranks=4)
    text = make_plan(traced("mlp"), MESH, replace(FAST, calibration=origin)).explain()
    assert f"{told}; fit error 5.1% (worst 20%): plans whose prices are closer than that are a tie" in text


@pytest.mark.parametrize(("share", "has_stages"), [(0.95, False), (0.6, True)])
def test_stages_gain_more_than_the_error_of_a_difference_between_two_prices(share, has_stages):
    slow = replace(CPU, levels=(LinkLevel(0, 1e-6, 2e8),))
    staged, whole = (plan(traced(NAME), Devices(4), slow) for plan in (choose_plan, make_plan))
    gain = 1 - staged.step_s / whole.step_s
    assert isinstance(staged, StagedPlan) and gain > 0.05
    plan = choose_plan(traced(NAME), Devices(4), with_error(share * gain, slow))
    assert isinstance(plan, StagedPlan) == has_stages
