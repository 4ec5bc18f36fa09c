"""The copies of a block within a stage are planned in two groups where the memory limit binds."""

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.models.catalogue import build_model
from autopar.planner.budget import Budget
from autopar.planner.pipeline import search_rank
from autopar.planner.pipeline.search_pipeline import plan_in_stages
from autopar.planner.pipeline.stage_tables import RankTask
from autopar.planner.pipeline.wanted_stages import StagePlans, Stages
from autopar.planner.request import PlanRequest

V100 = load_cluster("v100-25g")
LIMIT = PlanRequest(memory_limit_bytes=5 * 2**30)

Searched = list[tuple[RankTask, Stages, StagePlans]]


@pytest.fixture(scope="module")
def gpt() -> Graph:
    example = build_model("gpt2-xl", layers=8, batch=32)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Searched:
    """Each search within a limit, with its result."""
    searches, search = [], search_rank._search

    def kept(at: RankTask, stages: Stages, *rest: float, **how: object) -> StagePlans:
        searches.append((at, stages, search(at, stages, *rest, **how)))
        return searches[-1][-1]

    monkeypatch.setattr(search_rank, "_search", kept)
    return searches


def test_plans_in_two_groups_cost_and_take_what_evaluate_says(gpt: Graph, searched: Searched) -> None:
    plan_in_stages(gpt, parse_mesh("dp=4"), V100, LIMIT, budget=Budget.of(60))
    (found,) = [one for one in searched if one[-1].share is not None]
    at, stages, plans = found
    ((graph, assignment),) = plans.parts
    costs = evaluate(graph, assignment, at.task.mesh, V100, training=stages[0].request.training)
    assert plans.cost_s == pytest.approx(costs.step_s, rel=1e-12)
    assert search_rank._priced(at, plans, stages).memory_bytes == costs.total_memory_bytes <= at.limit_bytes


def test_two_groups_are_faster_within_the_memory_limit_than_copies_alike(
    gpt: Graph, searched: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = plan_in_stages(gpt, parse_mesh("dp=4"), V100, LIMIT, budget=Budget.of(60))
    (share,) = [plans.share for *_, plans in searched if plans.share is not None]
    assert 0.0 < share < 1.0
    monkeypatch.setattr(search_rank, "can_mix", lambda _: False)
    alike = plan_in_stages(gpt, parse_mesh("dp=4"), V100, LIMIT, budget=Budget.of(60))
    assert mixed is not None and alike is not None and mixed.step_s < alike.step_s
    assert max(*alike.memory_bytes, *mixed.memory_bytes) <= LIMIT.memory_limit_bytes
