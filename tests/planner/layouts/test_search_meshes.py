"""Planning as a whole."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.memory import usable_memory_bytes
from autopar.errors import InfeasibleError, PinError
from autopar.ir.folding.fold import fold
from autopar.ir.trace import trace
from autopar.mesh import Devices, Mesh
from autopar.planner.budget import Budget
from autopar.planner.choose import choose_plan
from autopar.planner.handwritten.tune import tuned
from autopar.planner.layouts.mesh_shapes import factorise
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.validate import check_assignment
from autopar.sbp.placement import format_layout
from tests.planner.cases import CPU, MESH, annotated, folded, traced
from tests.zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_a_plan_is_valid_and_no_worse_than_any_hand_plan(name):
    plan = make_plan(traced(name), MESH, CPU, budget=Budget.of(5.0))
    check_assignment(plan.assignment, traced(name), folded(name), annotated(name), MESH)
    assert {"ddp", "zero3", "megatron:dp=2,tp=2"} <= set(plan.hand)
    assert plan.costs.step_s <= min(cost.step_s for cost in plan.hand.values()) * (1 + 1e-9)
    assert 0.0 < plan.lower_bound_s <= plan.costs.step_s and 0.0 <= plan.gap < 0.4  # small models: latency


def test_planning_twice_gives_the_same_text():
    first, second = (make_plan(traced("gpt2"), MESH, CPU) for _ in range(2))
    assert first.dumps() == second.dumps()


def test_pins_hold():
    plan = make_plan(traced("mlp"), MESH, CPU, PlanRequest(pins={"head.weight": "S(1)S(0)"}))
    name = next(item.value.name for item in traced("mlp").inputs if item.fqn == "head.weight")
    assert format_layout(plan.assignment.layouts[name]) == "S(1)S(0)"


def test_a_pin_that_cannot_be_is_refused():
    with pytest.raises(PinError, match=r"tail\.weight"):
        make_plan(traced("mlp"), MESH, CPU, PlanRequest(pins={"tail.weight": "BB"}))


def test_a_memory_limit_holds_or_is_refused():
    free = make_plan(traced("vgg13"), MESH, CPU)
    limit = 0.8 * free.costs.total_memory_bytes
    tight = make_plan(traced("vgg13"), MESH, CPU, PlanRequest(memory_limit_bytes=limit))
    assert tight.costs.total_memory_bytes <= limit and tight.costs.step_s >= free.costs.step_s
    with pytest.raises(InfeasibleError, match=r"the least that would do is \d+ bytes.*smaller batch.*--memory-limit"):
        make_plan(traced("vgg13"), MESH, CPU, PlanRequest(memory_limit_bytes=1000.0))


@pytest.mark.parametrize("share", [1.0, 0.8])
@pytest.mark.parametrize("name", ["mlp", "vgg13"])
def test_a_plan_that_is_too_slow_is_the_best_all_the_same(name, share):
    limit = share * make_plan(traced(name), MESH, CPU).costs.total_memory_bytes
    request = PlanRequest(memory_limit_bytes=limit)
    full = make_plan(traced(name), MESH, CPU, request)
    for factor in (0.5, 1 - 1e-6, 1 + 1e-6, 2.0):
        found = make_plan(traced(name), MESH, CPU, request, to_beat_s=factor * full.step_s)
        if factor > 1 or share == 1:
            assert found.step_s == pytest.approx(full.step_s, rel=1e-9)
        assert found.costs.total_memory_bytes <= limit and found.step_s >= full.lower_bound_s
        assert min(factor * full.step_s, full.lower_bound_s) * (1 - 1e-9) <= found.lower_bound_s <= found.step_s


def test_plans_fit_the_cluster_by_default():
    free = make_plan(traced("vgg13"), MESH, CPU)
    assert free.memory_limit_bytes == usable_memory_bytes(CPU) < CPU.memory_bytes
    small = replace(CPU, memory_bytes=int(0.9 * free.costs.total_memory_bytes))
    assert make_plan(traced("vgg13"), MESH, small).costs.total_memory_bytes <= usable_memory_bytes(small)


def test_progress_and_timings_name_the_stages():
    told = []
    plan = make_plan(traced("mlp"), MESH, CPU, budget=Budget.of(progress=told.append))
    assert list(plan.timings) == ["fold", "annotate", "price", "hand plans", "search"]
    assert told[:5] == list(plan.timings) and all(seconds > 0 for seconds in plan.timings.values())


def test_without_time_the_best_hand_plan_is_taken_and_named():
    plan = make_plan(traced("gpt2"), MESH, CPU, budget=Budget.of(0.0))
    best = min(plan.hand.values(), key=lambda costs: costs.step_s)
    assert plan.found_by.startswith("hand plan ") or plan.costs.step_s < best.step_s
    assert f"found by {plan.found_by}" in plan.explain()


def test_an_open_mesh_gets_the_best_of_its_meshes():
    devices, cluster = Devices(8), load_cluster("v100")
    plan = make_plan(traced("mlp"), devices, cluster)
    meshes = factorise(8, cluster)
    alone = {str(mesh): make_plan(traced("mlp"), mesh, cluster).costs.step_s for mesh in meshes}
    assert set(plan.meshes) == set(alone)
    assert plan.costs.step_s <= min(alone.values()) * (1 + 1e-9)
    assert plan.costs.step_s == pytest.approx(min(plan.meshes.values()), rel=1e-9)
    assert plan.mesh in meshes and "Meshes searched" in plan.explain()
    assert Plan.loads(plan.dumps(), traced("mlp"), devices).assignment == plan.assignment


@pytest.mark.parametrize("time_limit_s", [0.0, 30.0])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "vgg13"])
def test_an_open_mesh_is_planned_no_worse_than_by_the_tuned_expert(name, time_limit_s):
    devices, cluster = Devices(8), load_cluster("v100")
    expert = tuned(traced(name), folded(name), devices, cluster, memory_limit_bytes=usable_memory_bytes(cluster)).best
    plan = make_plan(traced(name), devices, cluster, budget=Budget.of(time_limit_s))
    assert plan.costs.step_s <= expert.costs.step_s * (1 + 1e-9)
    assert 0 < plan.lower_bound_s <= plan.costs.step_s


class Neighbours(nn.Module):
    """A graph network, which hand plans leave whole or gather at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(x + torch.zeros_like(x).index_add(0, target, layer(x)[source]))
        return x.square().mean()


def test_an_open_mesh_over_nodes_is_searched_where_hand_plans_are_no_guide():
    """The best of them takes five times as long as the plan for two axes."""
    with torch.device("meta"):
        nodes, edges = torch.zeros(65536, 1024), torch.zeros(2**19, dtype=torch.long)
        graph = trace(Neighbours(), (nodes, edges, torch.zeros_like(edges)), {})
    cluster = load_cluster("v100-25g")
    given, found = (choose_plan(graph, mesh, cluster) for mesh in (Mesh((2, 8), ("a", "b")), Devices(16)))
    by_hand = tuned(graph, fold(graph), Devices(16), cluster).tried[0]
    assert by_hand.costs.step_s > 4 * given.step_s
    assert found.step_s <= given.step_s * (1 + 1e-9)


def test_it_is_said_what_the_bound_is_about():
    repeated, single = make_plan(traced("gpt2"), MESH, CPU), make_plan(traced("mlp"), MESH, CPU)
    assert "no plan whose inner layers are alike takes less than" in repeated.explain()
    assert "no plan takes less than" in single.explain()
    assert Plan.loads(repeated.dumps(), traced("gpt2"), MESH).bound_of == repeated.bound_of


def test_an_open_mesh_has_no_axes_to_pin_to():
    with pytest.raises(PinError, match="left open; write a mesh"):
        make_plan(traced("mlp"), Devices(4), CPU, PlanRequest(pins={"head.weight": "S(0)"}))


def test_of_pins_that_leave_no_plan_those_that_bind_are_named():
    # classifier.3 has 2 MiB in float64, four times with gradient and state
    pins = {"features.0.weight": "BB", "classifier.3.weight": "BB", "features.17.weight": "BB"}
    with pytest.raises(InfeasibleError, match=r"; the pins of classifier\.3\.weight together leave no plan within it"):
        make_plan(traced("vgg13"), MESH, CPU, PlanRequest(memory_limit_bytes=6e6, pins=pins))
    fitting = make_plan(
        traced("vgg13"), MESH, CPU, PlanRequest(memory_limit_bytes=6e6, pins={"features.0.weight": "BB"})
    )
    assert fitting.costs.total_memory_bytes <= 6e6
