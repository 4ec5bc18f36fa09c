"""The sweep finds what trying everything finds."""

from dataclasses import replace

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing.encode_decode import decode, encode
from autopar.costmodel.pricing.price import price
from autopar.errors import MeshError
from autopar.mesh import Devices, Mesh, parse_mesh
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.planner.handwritten.tune import tuned
from autopar.plans.validate import check_assignment
from tests.planner.cases import CPU, annotated, folded, traced

CLUSTER = load_cluster("a100")


def grids(num_devices: int) -> list[tuple[Mesh, str]]:
    """Every grid and flavour of a power of two, written out."""
    found = [(Mesh((num_devices,), ("dp",)), kind) for kind in ("ddp", "zero2", "zero3")]
    found += [(Mesh((num_devices,), ("tp",)), f"megatron:dp=1,tp={num_devices}{sp}") for sp in ("", ",sp")]
    tensor = 2
    while tensor < num_devices:
        mesh = Mesh((num_devices // tensor, tensor), ("dp", "tp"))
        flavours = ("", ",sp", ",zero2", ",zero3", ",sp,zero2", ",sp,zero3")
        found += [(mesh, f"megatron:dp={num_devices // tensor},tp={tensor}{flavour}") for flavour in flavours]
        tensor *= 2
    return found


def enumerated(name: str, num_devices: int) -> dict[str, tuple[float, int]]:
    found = {}
    for mesh, kind in grids(num_devices):
        candidates = annotated(name, mesh)
        assignment = hand_plan(parse_hand_plan(kind, mesh), traced(name), folded(name), candidates, mesh)
        priced = price(traced(name), folded(name), candidates, mesh, CLUSTER)
        in_buckets = decode(priced, traced(name), folded(name), encode(priced, traced(name), folded(name), assignment))
        costs = evaluate(traced(name), in_buckets, mesh, CLUSTER)
        found[kind] = costs.step_s, costs.total_memory_bytes
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "vgg13"])
def test_the_sweep_is_a_minimum_over_everything(name):
    truth = enumerated(name, 8)
    found = tuned(traced(name), folded(name), Devices(8), CLUSTER)
    assert {tried.name for tried in found.tried} == set(truth)
    for tried in found.tried:
        assert tried.costs.step_s == pytest.approx(truth[tried.name][0], rel=1e-9), tried.name
        assert tried.costs.memory_bytes == pytest.approx(truth[tried.name][1], rel=1e-9), tried.name
    assert found.best.costs.step_s == pytest.approx(min(step_s for step_s, _ in truth.values()), rel=1e-9)
    assert evaluate(traced(name), found.assignment, found.best.mesh, CLUSTER).step_s == pytest.approx(
        found.best.costs.step_s, rel=1e-9
    )


def test_the_best_fits_the_memory_limit():
    truth = enumerated("vgg13", 8)
    limit = sorted(num_bytes for _, num_bytes in truth.values())[3]
    found = tuned(traced("vgg13"), folded("vgg13"), Devices(8), CLUSTER, memory_limit_bytes=limit)
    fitting = [step_s for step_s, num_bytes in truth.values() if num_bytes <= limit]
    assert found.best.costs.memory_bytes <= limit and found.best.costs.step_s == pytest.approx(min(fitting), rel=1e-9)
    nothing = tuned(traced("vgg13"), folded("vgg13"), Devices(8), CLUSTER, memory_limit_bytes=1.0)
    assert nothing.best is None and nothing.assignment is None and len(nothing.tried) == len(truth)


def test_a_mesh_is_tried_with_each_choice_of_tensor_axes():
    mesh = parse_mesh("2x2x2")
    found = tuned(traced("llama"), folded("llama"), mesh, CPU)
    assert {tried.plan.tensor_axes for tried in found.tried} == {
        (),
        (0,),
        (1,),
        (2,),
        (0, 1),
        (0, 2),
        (1, 2),
        (0, 1, 2),
    }
    assert len(found.tried) == 3 + 6 * 6 + 2
    check_assignment(found.assignment, traced("llama"), folded("llama"), annotated("llama", mesh), mesh)


def test_no_more_tensor_ranks_than_asked():
    found, few = (tuned(traced("llama"), folded("llama"), Devices(8), CLUSTER, most_tensor=most) for most in (8, 2))
    assert {one.mesh for one in few.tried} == {parse_mesh("dp=8"), parse_mesh("dp=4,tp=2")}
    assert {str(one) for one in few.tried} < {str(one) for one in found.tried}


def test_more_devices_than_there_are():
    node = replace(CLUSTER, levels=CLUSTER.levels[:1])
    with pytest.raises(MeshError, match="16 devices"):
        tuned(traced("mlp"), folded("mlp"), Devices(16), node)
