"""Plans on a mesh, seen on a finer one."""

import pytest

from autopar.costmodel.evaluate import evaluate
from autopar.errors import MeshError
from autopar.mesh import Mesh, parse_mesh
from autopar.planner.layouts.refine_mesh import lift
from autopar.plans.validate import check_assignment
from tests.planner.cases import CPU, annotated, by_hand, folded, traced

COARSE, FINE = Mesh((2, 4), ("dp", "tp")), Mesh((2, 2, 2), ("dp", "t0", "t1"))


@pytest.mark.parametrize("kind", ["ddp", "megatron"])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_a_lifted_plan_is_a_plan_and_costs_the_same(name, kind):
    assignment = by_hand(name, kind, COARSE)
    lifted = lift(assignment, COARSE, FINE)
    check_assignment(lifted, traced(name), folded(name), annotated(name, FINE), FINE)
    costs, same = evaluate(traced(name), lifted, FINE, CPU), evaluate(traced(name), assignment, COARSE, CPU)
    assert costs.step_s == pytest.approx(same.step_s, rel=1e-9)
    assert costs.memory_bytes == same.memory_bytes


@pytest.mark.parametrize("fine", ["4x2", "2x2x4", "8", "2x2"])
def test_only_to_finer_meshes(fine):
    with pytest.raises(MeshError, match="does not refine"):
        lift(by_hand("mlp", "ddp", COARSE), COARSE, parse_mesh(fine))
