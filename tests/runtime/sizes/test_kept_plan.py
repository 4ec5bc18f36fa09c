"""A plan is kept for other sizes where it is valid, fits, and planning anew cannot pay."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel.evaluate import evaluate
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.peak_memory.predict import rank_peaks
from autopar.plans.choices import Choices
from autopar.plans.plan import Plan
from autopar.runtime.sizes.call_kind import CallKind
from autopar.runtime.sizes.kept_plan import KeptPlan, Trial, _rounding
from autopar.sbp.candidates import even_layouts


class Predicting:
    """A planner that only predicts peaks, and counts how often."""

    def __init__(self) -> None:
        self.num_predicted = 0

    def __call__(self, *args: object) -> Plan:
        raise AssertionError("nothing is planned here")

    def peaks(self, plan: Plan) -> tuple[int, ...]:
        self.num_predicted += 1
        return rank_peaks(plan)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to("meta")


def graph_of(rows: int) -> Graph:
    return trace(model(), (torch.zeros(rows, 32, device="meta"),), {})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(model(), "dp=2,tp=2", cluster="free-links", args=(torch.zeros(8, 32, device="meta"),))


def kept_for(plan: Plan, **changes: object) -> KeptPlan:
    return KeptPlan.of(replace(plan, **changes), ((8, 32),), 3.0)


@pytest.mark.parametrize("rows", [4, 8, 64])
def test_the_same_choices(plan: Plan, rows: int) -> None:
    found = kept_for(plan).choices_for(graph_of(rows), {}, {}, Predicting())
    assert found is not None and found.assignment == plan.assignment
    assert found.graph.inputs[-1].value.shape == (rows, 32)
    assert found.plan.step_s == evaluate(graph_of(rows), plan.assignment, plan.mesh, plan.cluster).step_s


def test_what_does_not_divide_is_split_in_parts_that_differ(plan: Plan) -> None:
    (argument,) = (item.value.name for item in plan.graph.of_kind("argument"))
    assert any(part.is_split for part in plan.assignment.layouts[argument]), "the batch is split"
    found = kept_for(plan).choices_for(graph_of(7), {}, {}, Predicting())
    assert found is not None and found.assignment.layouts[argument] == plan.assignment.layouts[argument]


def test_memory_of_sizes_that_do_not_divide_is_predicted_once_where_it_is_scarce(plan: Plan) -> None:
    kept, planner = kept_for(plan), Predicting()
    for rows in (7, 5, 9, 16):
        assert kept.choices_for(graph_of(rows), {}, {}, planner) is not None and not planner.num_predicted
    tight, planner = kept_for(plan, memory_limit_bytes=3.0 * plan.peak_bytes[0]), Predicting()
    for rows in (7, 5, 9, 7):
        assert tight.choices_for(graph_of(rows), {}, {}, planner) and planner.num_predicted <= 1, rows
    assert tight.choices_for(graph_of(4097), {}, {}, planner) is None and planner.num_predicted <= 2


@pytest.mark.parametrize("rows", [8, 64, 1024])
@pytest.mark.parametrize("mesh", ["dp=8", "dp=2,tp=4"])
def test_the_bound_of_sizes_that_do_not_divide_is_one(mesh: str, rows: int) -> None:
    made = autopar.plan(model(), mesh, cluster="free-links", args=(torch.zeros(rows, 32, device="meta"),))
    for odd in (rows - 1, rows + 1):
        choices = Choices.of(made, graph_of(odd))
        growth = max(1.0, odd / rows) * _rounding(choices)
        bounds = [peak * growth**2 for _, peak in kept_for(made)._known_peaks(choices)]
        assert bounds and max(rank_peaks(choices.plan)) <= min(bounds)


def test_a_predicted_peak_serves_larger_calls(plan: Plan) -> None:
    kept, planner = kept_for(plan, memory_limit_bytes=20.0 * plan.peak_bytes[0]), Predicting()
    for rows in (64, 72, 80, 88):
        assert kept.choices_for(graph_of(rows), {}, {}, planner) and planner.num_predicted == 1, rows


def test_layouts_that_must_stay(plan: Plan) -> None:
    kept, planner = kept_for(plan), Predicting()
    assert kept.choices_for(graph_of(16), {"0.weight": "S(1)S(1)"}, {}, planner) is None
    (name,) = plan.assignment.outputs
    assert kept.choices_for(graph_of(16), {}, {name: plan.assignment.outputs[name]}, planner) is not None
    others = [layout for layout in even_layouts((16, 32), (2, 2)) if layout != plan.assignment.outputs[name]]
    assert others and all(kept.choices_for(graph_of(16), {}, {name: layout}, planner) is None for layout in others)


def test_memory_is_predicted_where_a_bound_does_not_tell(plan: Plan) -> None:
    planner, (peak,) = Predicting(), plan.peak_bytes
    assert kept_for(plan).choices_for(graph_of(80), {}, {}, planner) and not planner.num_predicted
    tight = kept_for(plan, memory_limit_bytes=2.0 * peak)
    assert tight.choices_for(graph_of(4), {}, {}, planner) and not planner.num_predicted
    assert tight.choices_for(graph_of(16), {}, {}, planner) and planner.num_predicted == 1
    (large,) = rank_peaks(Choices.of(tight.plan, graph_of(4096)).plan)
    assert large > 2 * peak and tight.choices_for(graph_of(4096), {}, {}, planner) is None
    assert planner.num_predicted == 2


def test_no_claim_of_a_file_is_believed(plan: Plan) -> None:
    planner = Predicting()
    assert kept_for(plan, is_from_file=True, peak_bytes=(1,)).choices_for(graph_of(16), {}, {}, planner)
    assert planner.num_predicted == 1


def test_planned_anew_once_calls_have_taken_as_long(plan: Plan) -> None:
    kept = kept_for(replace(plan))
    inside, outside = Trial(kept, plan, ((8, 32),)), Trial(kept, plan, ((16, 32),))
    kept.planning_s = 2.5 * plan.step_s
    assert [inside.is_over() for _ in range(10)] == [False] * 10
    assert [outside.is_over() for _ in range(3)] == [False, False, True]
    kept.widen(((32, 32),))
    assert kept.lost_s == 0 and kept.covers(((16, 32),)) and not outside.is_over()
    assert not kept.covers(((33, 32),)) and not kept.covers(((7, 32),))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to("meta")


def planned_for(rows: int) -> Plan:
    return autopar.plan(wide(), "4", cluster="h100", args=(torch.zeros(rows, 512, device="meta"),))


@pytest.mark.parametrize(("rows", "pays"), [(16, False), (1024, True)])
def test_a_plan_made_anew_is_taken_where_it_is_5_percent_faster(rows: int, pays: bool) -> None:
    """By the predicted times of a step: few rows are best computed in other layouts than many."""
    shapes = ((rows, 512),)
    kind, few = CallKind(((8, 512),)), planned_for(8)
    assert kind.keep(few, ((8, 512),), 3.0, None) is few
    graph = trace(wide(), (torch.zeros(rows, 512, device="meta"),), {})
    trial = kind.trial(graph, shapes, {}, {}, Predicting())
    assert trial is not None and trial.choices.assignment == few.assignment
    anew = planned_for(rows)
    assert (anew.step_s < 0.95 * trial.choices.plan.step_s) is pays
    assert kind.keep(anew, shapes, 3.0, trial) is (anew if pays else trial.choices.plan)
    assert len(kind.plans) == 1 + pays and trial.kept.covers(shapes) is not pays
    best = kind.trial(graph, shapes, {}, {}, Predicting())
    assert best is not None and best.choices.plan.step_s == min(anew.step_s, trial.choices.plan.step_s)
    assert best.is_over() is False and best.kept.lost_s == 0, "these sizes were planned for"
