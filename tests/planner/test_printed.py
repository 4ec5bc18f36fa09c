"""What planning makes on the way can be read."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.trace_with_loss import traced
from autopar.mesh import parse_devices
from autopar.planner.choose import choose_plan
from autopar.planner.printed import printed
from autopar.planner.request import PlanRequest


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(8)))


def shown(mesh: str, **options: Any) -> list[tuple[str, Any]]:
    """(name, artifact) in the order in which planning makes them."""
    x, found = torch.zeros(8, 16), []
    graph = traced(stack(), nn.functional.mse_loss, (x, x), {})
    request = PlanRequest(time_limit_s=10.0, **options)
    choose_plan(graph, parse_devices(mesh), load_cluster("cpu"), request, watch=lambda *one: found.append(one))
    return found


def test_a_plan_without_stages_shows_each_step_once():
    found = shown("2x2")
    assert [name for name, _ in found] == ["graph", "folded", "candidates", "priced", "choice", "plan"]
    graph, folded, candidates, table, choice, plan = (artifact for _, artifact in found)
    text = {name: printed(artifact) for name, artifact in found}
    assert text["folded"].startswith(f"{folded.repeats[0].count} times {len(folded.repeats[0].ops)} ops: ")
    assert text["candidates"].count(" strategies\n") == len(candidates.strategies)
    assert text["priced"].startswith(f"{len(table.nodes)} nodes, {len(table.edges)} edges")
    assert list(map(int, text["choice"].splitlines()[1].split())) == list(choice.strategies)
    assert all(op.name in text["graph"] for op in graph.ops) and text["plan"].strip() == plan.explain().strip()


def test_a_pipeline_shows_the_points_by_hand_and_the_graphs_of_its_stages():
    found = shown("pp=2,dp=2", num_microbatches=4)
    kinds = [name.split(": ")[-1] for name, _ in found]
    assert kinds[:3] == ["graph", "stages by hand", "stages"] and kinds[-1] == "plan" and "choice" in kinds
    texts = [printed(artifact) for _, artifact in found]
    assert "pp=2,dp" in texts[1] or "pp=2,zero" in texts[1]
    assert texts[2].startswith("stage 0\n") and "\nstage 1\n" in texts[2]


def test_what_is_no_artifact_is_refused():
    with pytest.raises(TypeError, match="artifact of planning, such as a Graph or a Plan"):
        printed(3)
