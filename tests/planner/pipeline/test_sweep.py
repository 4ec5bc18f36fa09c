"""The schedules that the sweep over stages tries."""

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.folding.fold import fold
from autopar.ir.passes.keep_loss import loss_only
from autopar.mesh import Mesh
from autopar.planner.pipeline.hand_points import model_of
from autopar.planner.pipeline.sweep import sweep
from autopar.planner.request import PlanRequest
from bench.problem import example_of, graph_of
from bench.suite import Case


@pytest.mark.parametrize(("cluster", "is_first"), [("v100-25g", True), ("h100", False)])
def test_gpipe_is_tried_where_sends_are_slow_and_memory_is_there(cluster: str, is_first: bool) -> None:
    graph = loss_only(graph_of(example_of(Case("gpt2", cluster, "8", 64, sequence=64, layers=8))))
    meshes, roomy = [(4, Mesh((4, 2), ("dp", "tp")))], PlanRequest(memory_limit_bytes=1e12)
    points = sweep(model_of(graph, fold(graph)), meshes, load_cluster(cluster), roomy)
    assert (points[0].schedule.name == "gpipe") == is_first
    others = min(one.step_s for one in points if one.schedule.name != "gpipe")
    assert is_first == (points[0].step_s < 0.98 * others)
    assert is_first == any(one.schedule.name == "gpipe" for one in points)
