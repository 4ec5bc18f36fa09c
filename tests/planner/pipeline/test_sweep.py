"""The schedules that the sweep over stages tries."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.pipeline.hand_points import _counts, grids, model_of, with_sequence
from autopar.planner.pipeline.sweep import named_point, sweep
from autopar.planner.request import PlanRequest
from autopar.plans.serialise import HandCosts
from autopar.search.deadline import Deadline
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


def test_points_whose_costs_are_known_are_tried_again_without_time() -> None:
    """After a plan whose predicted peak does not fit, they are swept again under a lower limit."""
    graph = loss_only(graph_of(example_of(Case("gpt2", "h100", "8", 64, sequence=64, layers=8))))
    model, cluster, asked = model_of(graph, fold(graph)), load_cluster("h100"), PlanRequest(memory_limit_bytes=1e12)
    meshes = [*grids(8, cluster, num_layers=8, most_tensor=4)]
    swept = sweep(model, meshes, cluster, asked)
    for is_open in (False, True):
        again = sweep(model, meshes, cluster, asked, deadline=Deadline.after(0.0), is_open=is_open)
        assert len(again) > 8 and {one.name for one in again} == {one.name for one in swept}


def test_experts_are_divided_among_some_of_the_ranks_that_split_the_batch() -> None:
    cluster, sizes = load_cluster("h100"), {"num_layers": 2, "most_tensor": 1}
    found = {(num, mesh.shape) for num, mesh in grids(64, cluster, **sizes, num_experts=48) if "ep" in mesh.axis_names}
    assert found == {(1, (8, 8)), (1, (4, 16)), (2, (4, 8)), (2, (2, 16))}
    assert not any("ep" in mesh.axis_names for _, mesh in grids(64, cluster, **sizes))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 64}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, num_experts=48)
    tokens = torch.zeros(64, 16, dtype=torch.long)
    graph = loss_only(trace(skeleton(Qwen3MoeForCausalLM(config)), (), {"input_ids": tokens, "labels": tokens}))
    model, mesh, asked = model_of(graph, fold(graph)), Mesh((8, 8), ("dp", "ep")), PlanRequest(memory_limit_bytes=1e12)
    points = sweep(model, [(1, mesh)], cluster, asked)
    assert points and {one.plan.expert_axes for one in points} == {(1,)}
    costs = HandCosts(points[0].step_s, max(points[0].rank_bytes))
    named = named_point(points[0].name, costs, model, Mesh((64,), ("d",)), cluster, asked)
    assert named is not None and named.mesh == mesh


@pytest.mark.parametrize(("limit_bytes", "is_split"), [(2e10, True), (1e12, False)])
def test_sequences_are_split_where_no_microbatch_can_be_smaller(limit_bytes: float, is_split: bool) -> None:
    graph = loss_only(graph_of(example_of(Case("llama3-8b", "h100", "8", 8, sequence=32768, layers=4))))
    model, cluster = model_of(graph, fold(graph)), load_cluster("h100")
    asked, meshes = PlanRequest(memory_limit_bytes=limit_bytes), [*grids(8, cluster, num_layers=2, most_tensor=8)]
    without, points = (sweep(model, meshes, cluster, asked, is_open=is_open) for is_open in (False, True))
    split = [one for one in points if one.plan.sequence_axes]
    assert bool(split) == is_split and not any(one.plan.sequence_axes for one in without)
    for one in split[:4]:
        sizes = dict(zip(one.mesh.axis_names, one.mesh.shape))
        assert one.schedule.num_microbatches * sizes.get("dp", 1) == 8 and sizes["cp"] > 1
        assert one.step_s < 0.97 * without[0].step_s
        costs = HandCosts(one.step_s, max(one.rank_bytes))
        named = named_point(one.name, costs, model, Mesh((8,), ("d",)), cluster, asked)
        assert named is not None and named.mesh.shape == one.mesh.shape


@pytest.mark.parametrize(
    ("shape", "names"), [((2, 4), ("dp", "tp")), ((8,), ("dp",)), ((4,), ("tp",)), ((2, 4), ("dp", "ep"))]
)
def test_an_axis_of_the_sequence_takes_devices_of_all_others(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    known, found = dict(zip(names, shape)), list(with_sequence(Mesh(shape, names)))
    sizes = [dict(zip(one.axis_names, one.shape)) for one in found]
    data, tensor = known.get("dp", 1), known.get("tp", 1)
    every = [(d, c, t) for c in (2, 4, 8) for d in range(1, 9) for t in range(1, 9) if d * c * t == data * tensor]
    wanted = [(d, c, t) for d, c, t in every if data % d == 0 and tensor % t == 0 and "ep" not in names]
    assert sorted((one.get("dp", 1), one["cp"], one.get("tp", 1)) for one in sizes) == sorted(wanted)


def test_microbatches_of_one_sample_are_tried_of_any_batch() -> None:
    graph = loss_only(graph_of(example_of(Case("gpt2", "h100", "8", 40, sequence=64, layers=2))))
    model = model_of(graph, fold(graph))
    assert [_counts(model, num_ranks) for num_ranks in (2, 4)] == [[2, 4, 5, 8, 10, 20, 40], [4, 5, 8, 10, 20, 40]]
