"""A hand plan costs the same wherever it is shown."""

import pytest

from autopar.mesh import Mesh
from autopar.planner.choose import choose_plan
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import PlanRequest
from tests.planner.cases import CPU, traced
from tests.zoo import build


def test_a_plan_by_name_costs_what_the_table_beside_a_found_plan_says():
    mesh, graph = Mesh((4,), ("dp",)), traced("llama")
    found = choose_plan(graph, mesh, CPU, PlanRequest())
    assert len(found.hand) > 3
    for name, costs in found.hand.items():
        plan = named_plan(name, build("llama").model, graph, mesh, CPU, PlanRequest())
        assert plan.step_s == pytest.approx(costs.step_s, rel=1e-12), name
        assert max(plan.memory_bytes) == costs.memory_bytes, name
