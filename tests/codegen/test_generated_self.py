"""Every implementation of the `self` of generated code runs programs that use all of it."""

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import get_protocol_members

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.generated_self import GeneratedSelf
from autopar.codegen.lower import lower
from autopar.codegen.program import Program
from autopar.ir.interpret import run_constants
from autopar.ir.op_facts import is_random
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.peak_memory.device_kernels import without_data
from autopar.peak_memory.dry_run import Rank
from autopar.plans.plan import Plan
from autopar.runtime.accumulate import open_step
from autopar.runtime.dtensor_state import install, owners, shard_model
from autopar.runtime.load_program import Loaded, axes_of, load
from autopar.runtime.pipeline.trainer import Pass
from autopar.verify.check_placements import check
from tests.runtime.training import plan_called

MEMBER = re.compile(r"\bself\.(\w+)")
MESH = Mesh((1,), ("dp",))


class Everything(nn.Module):
    """A parameter, a buffer that is read and one that is written, a constant, dropout of a weight and of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        mask = torch.tril(torch.ones(4, 4))
        return F.dropout(F.linear(x, F.dropout(self.weight, 0.5) * mask) * self.scale, 0.5) + self.calls


@pytest.fixture
def mesh(tmp_path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.axis_names)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def planned() -> Plan:
    graph = trace(Everything(), (torch.ones(3, 4),), {})
    return plan_called("ddp", graph, MESH)


def lowered(plan: Plan, *, is_split: bool) -> Program:
    first = next(op.name for op in plan.graph.ops if is_random(op))
    return lower(plan.graph, MESH, plan.assignment, is_split=is_split, alike=(first,) if is_split else ())


def members(source: str) -> set[str]:
    return set(MEMBER.findall(source))


def test_emitted_source_uses_what_the_protocol_names(planned: Plan) -> None:
    found = members(emit(lowered(planned, is_split=True)))
    assert found | {"locals_together"} == get_protocol_members(GeneratedSelf)
    assert members(emit(lowered(planned, is_split=False))) == found - {"used", "step_seed"}


def test_parameters_that_are_converted_together_are_read_together() -> None:
    mesh = Mesh((2,), ("dp",))
    graph = trace(nn.Linear(4, 4), (torch.ones(6, 4),), {})
    plan = plan_called("ddp", graph, mesh)
    program = lower(graph, mesh, plan.assignment, is_split=False)
    assert members(emit(program)) == {"axes", "locals_together"}
    with without_data("cpu"):
        assert [x.shape for x in Rank.of(program, (), {}, "cpu").run({})] == [(3, 4)]


def installed(plan: Plan, mesh: DeviceMesh, *, is_split: bool) -> Loaded:
    module, graph = Everything(), plan.graph
    install(module, graph, shard_model(module, graph, plan.assignment.layouts, mesh), is_in_use=False)
    constants = run_constants(graph, torch.device("cpu"))
    fields = {"choices": plan, "graph": graph, "mesh": mesh, "axes": axes_of(mesh), "constants": constants}
    return load(lowered(plan, is_split=is_split), **fields, owners=owners(module))


def test_of_a_whole_batch(planned: Plan, mesh: DeviceMesh) -> None:
    loaded = installed(planned, mesh, is_split=False)
    (first,), (second,) = (loaded.function(loaded, torch.ones(3, 4)) for _ in range(2))
    assert first.shape == (3, 4) and not torch.equal(first, second)
    assert loaded.state("calls").to_local().tolist() == [2.0] * 4
    with pytest.raises(AssertionError, match="microbatch"):
        _ = loaded.step_seed


def test_of_microbatches(planned: Plan, mesh: DeviceMesh) -> None:
    loaded = installed(planned, mesh, is_split=True)
    open_step(loaded)
    x = torch.ones(64, 4)
    parts = [Pass(loaded, loaded.constants, seed, 7) for seed in (1, 1, 2)]
    # less what the written buffer adds, which counts the calls
    first, same, other = (loaded.function(part, x)[0] - number for number, part in enumerate(parts, 1))
    torch.testing.assert_close(first, same)
    assert not torch.equal(first, other)
    # the batch's dropout keeps an entry of a column or not; its size is what the weight's dropout left, alike in all
    torch.testing.assert_close(first.amax(0), other.amax(0))


def test_on_tensors_without_data(planned: Plan) -> None:
    with without_data("cpu"):
        rank = Rank.of(lowered(planned, is_split=True), (), {}, "cpu")
        open_step(rank)
        assert [x.shape for x in rank.run({})] == [(3, 4)]


@pytest.mark.parametrize("is_split", [False, True])
def test_under_the_check_of_placements(planned: Plan, mesh: DeviceMesh, is_split: bool) -> None:
    check(lowered(planned, is_split=is_split), mesh)


def test_under_torch_compile_a_program_is_one_graph(mesh: DeviceMesh) -> None:
    """Parameters are read before it: each would be the end of a graph of its own."""
    graphs: list[int] = []

    def noted(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), torch.randn(3, 4)
    expected = model(x)
    module = autopar.compile(model, mesh, args=(x,), cluster="free-links")
    torch.testing.assert_close(torch.compile(module, backend=noted)(x), expected)
    (number,) = (number for number in graphs if number > 1)
    assert number >= 5
