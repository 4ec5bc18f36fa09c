"""A bound from what is saved, beside the least of the tables of the search."""

from dataclasses import replace

import pytest

from autopar.costmodel.training import Training
from autopar.costmodel.work_bound import floor_bytes
from autopar.errors import InfeasibleError
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.mesh import Devices, Mesh, SeenShares, parse_mesh
from autopar.planner.budget import Budget
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.problem import Setting
from autopar.planner.request import PlanRequest
from autopar.search.bounds.drop_edges import tractable
from autopar.search.bounds.lagrange import least_memory
from autopar.search.min_plus.eliminate import Limits
from tests.planner.cases import CPU, folded, traced


def least_bytes(name: str, shape: str) -> float:
    """Of all choices of the table of a model without optimizer."""
    graph, mesh = traced(name), parse_mesh(shape)
    setting = Setting(graph, mesh, CPU, PlanRequest(training=Training("none")).on(CPU), Budget.of(600.0))
    problem = setting.problem(segmented(folded(name), graph, ends_apart(folded(name))))
    return least_memory(*tractable(problem.priced.table, Limits()))[0]


@pytest.mark.parametrize("shape", ["1", "2x2"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2", "llama", "vit"])
def test_no_plan_saves_less_than_the_floor(name, shape):
    assert 0 < floor_bytes(traced(name), parse_mesh(shape).num_devices) <= least_bytes(name, shape)


@pytest.mark.parametrize("mesh", [Devices(4), parse_mesh("2x2")], ids=["open", "2x2"])
def test_nothing_is_searched_where_the_floor_is_above_the_limit_and_another_way_has_a_plan(mesh: Mesh | Devices):
    limit = 0.9 * floor_bytes(traced("gpt2"), 4)
    request, budget = PlanRequest(memory_limit_bytes=limit), replace(Budget.of(60.0), has_other=True)
    with pytest.raises(InfeasibleError, match=r"saves .* of activations at least, more than the limit"):
        make_plan(traced("gpt2"), mesh, CPU, request, budget=budget)
    assert budget.timings == {}


def test_the_floor_says_nothing_of_a_rank_with_fewer_rows_than_others():
    graph, budget = traced("gpt2"), replace(Budget.of(60.0), has_other=True)
    rows = graph.of_kind("argument")[0].value.shape[0]
    mesh = Mesh((2,), ("dp",), ((0, SeenShares((rows - 1, 1), 1)),))
    with pytest.raises(InfeasibleError, match="no choice fits"):
        make_plan(graph, mesh, CPU, PlanRequest(memory_limit_bytes=0.9 * floor_bytes(graph, 2)), budget=budget)
    assert budget.timings
