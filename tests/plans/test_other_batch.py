"""A plan in stages for batches of other sizes. The numbers of such steps: tests/journey/cases/batches.py."""

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.errors import MicrobatchError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.print_graph import fingerprint
from autopar.ir.trace_with_loss import traced
from autopar.plans.fit_assignment import fit_assignment
from autopar.plans.other_batch import goes_by, of_other_batch
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from tests.journey.cases.batches import Words
from tests.journey.stack import WIDTH, Stack

PLANNED, MICROBATCHES = 16, 4


def graph_of(rows: int, model: torch.nn.Module | None = None) -> Graph:
    torch.manual_seed(0)
    return traced(model or Stack(depth=4), None, (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)), {})


def planned(mesh: str = "pp=2,dp=2", schedule: str = "1f1b") -> StagedPlan:
    torch.manual_seed(0)
    args = (torch.randn(PLANNED, WIDTH), torch.randn(PLANNED, WIDTH))
    asked = {"num_microbatches": MICROBATCHES, "schedule": schedule}
    found = autopar.plan(Stack(depth=4), mesh, cluster="free-links", args=args, **asked)
    assert isinstance(found, StagedPlan)
    return found


def test_what_divides_is_run_as_planned() -> None:
    plan = planned()
    found = of_other_batch(plan, graph_of(64))
    assert found.schedule == plan.schedule
    assert [stage.assignment for stage in found.stages] == [stage.assignment for stage in plan.stages]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("rows", [15, 13, 6, 5, 2, 1])
def test_every_batch_has_a_plan_whose_parameters_lie_as_they_do(rows: int, schedule: str) -> None:
    plan = planned(schedule=schedule)
    found = of_other_batch(plan, graph_of(rows))
    assert rows % found.schedule.num_microbatches == 0
    for was, now in zip(plan.stages, found.stages):
        stored = {item.value.name for item in was.graph.of_kind("parameter")}
        assert stored == {item.value.name for item in now.graph.of_kind("parameter")}
        assert all(was.assignment.layouts[name] == now.assignment.layouts[name] for name in stored)
        assert now.training.num_microbatches == found.schedule.num_microbatches


def test_microbatches_are_as_small_as_the_memory_asks() -> None:
    plan = planned()
    free = of_other_batch(plan, graph_of(17))
    assert free.schedule.num_microbatches == 1, "the fewest are the fastest"
    tight = of_other_batch(replace(plan, memory_limit_bytes=0.0), graph_of(17))
    assert tight.schedule.num_microbatches == 17
    assert all(here <= there for here, there in zip(tight.memory_bytes, plan.memory_bytes))


def test_another_model_is_no_other_batch() -> None:
    with pytest.raises((PlanError, ValueError), match=r"plan|graph"):
        of_other_batch(planned(), graph_of(PLANNED, Stack(depth=2)))


def test_a_batch_for_which_the_model_has_other_ops_is_refused_as_a_batch() -> None:
    with pytest.raises(MicrobatchError, match="a batch of 64 cannot run in the stages that were planned for 16"):
        of_other_batch(planned(), graph_of(64, Stack(depth=2)))


def test_stages_go_by_their_plan_and_microbatches_if_they_do_not_divide() -> None:
    staged, accumulated = planned(), planned("dp=2", "1f1b")
    assert accumulated.schedule.num_ranks == 1
    assert goes_by(staged, graph_of(8), trains=False) and goes_by(staged, graph_of(5), trains=True)
    assert not goes_by(accumulated, graph_of(5), trains=False)
    assert not goes_by(accumulated, graph_of(8), trains=True)
    assert goes_by(accumulated, graph_of(6), trains=True)


@pytest.mark.parametrize("mesh", ["2x2", "dp=4", "2x2x2"])
def test_an_assignment_fits_its_own_graph_as_it_is_and_others_validly(mesh: str) -> None:
    torch.manual_seed(0)
    words = torch.randint(5, (8, 6))
    plan = autopar.plan(Words(), mesh, cluster="free-links", args=(words, words))
    assert isinstance(plan, Plan)
    assert fit_assignment(plan.assignment, plan.graph, plan.mesh) == plan.assignment
    for rows in (7, 4, 1):
        graph = traced(Words(), None, (words[:rows], words[:rows]), {})
        fitted = fit_assignment(plan.assignment, graph, plan.mesh)
        other = replace(plan, fingerprint=fingerprint(graph), assignment=fitted)
        assert Plan.of_saved(other, graph, plan.mesh, is_own=True).step_s > 0
