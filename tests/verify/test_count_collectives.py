"""Collectives are counted however they are issued: bytes, axis and pass are known here by construction."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from autopar.sbp.axis import Axis
from autopar.sbp.convert import convert
from autopar.sbp.placement import I, R, S
from autopar.sbp.redistribute import Collective
from autopar.verify.count_collectives import count_collectives
from tests.workers import device_mesh

pytestmark = pytest.mark.multirank


def issue_each_kind() -> list[Collective]:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    group = mesh.get_group(1)
    x = torch.ones(8, 2)
    with count_collectives(mesh) as issued:
        dist.all_reduce(x, group=mesh.get_group(0))
        dist.all_gather_into_tensor(torch.empty(16, 2), x, group=group)
        dist.reduce_scatter_tensor(torch.empty(4, 2), x, group=group)
        dist.all_to_all_single(torch.empty(8, 2), x, group=group)
        functional.wait_tensor(functional.all_gather_tensor(x, 0, group))
        dist.all_reduce(x)
        dist.barrier()
    return issued


def convert_and_back() -> list[Collective]:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    axis = Axis("tp", 2, mesh.get_local_rank(1), mesh.get_group(1))
    x = torch.ones(4, 2, requires_grad=True)
    with count_collectives(mesh) as issued:
        whole = convert(x, axis, S(0), R)
        convert(whole * 2, axis, I, R).sum().backward()
    return issued


def gather_a_dtensor() -> list[Collective]:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    x = distribute_tensor(torch.ones(8, 2), mesh, [Replicate(), Shard(0)])
    with count_collectives(mesh) as issued:
        assert x.full_tensor().shape == (8, 2)
    return issued


def train_a_linear(wrap: str) -> list[Collective]:
    mesh = device_mesh((4,), ("dp",))
    model = torch.nn.Linear(8, 4, bias=False)
    model = DistributedDataParallel(model, device_mesh=mesh) if wrap == "ddp" else fully_shard(model, mesh=mesh)
    with count_collectives(mesh) as issued:
        model(torch.ones(2, 8)).sum().backward()
    return issued


def test_each_kind_with_its_axis_and_larger_side(ranks4):
    expected = [
        Collective("all_reduce", (0,), 64, "forward"),
        Collective("all_gather", (1,), 128, "forward"),
        Collective("reduce_scatter", (1,), 64, "forward"),
        Collective("all_to_all", (1,), 64, "forward"),
        Collective("all_gather", (1,), 128, "forward"),
        Collective("all_reduce", (), 64, "forward"),
    ]
    assert ranks4.run(issue_each_kind) == [expected] * 4


def test_autograd_is_the_backward_phase(ranks4):
    expected = [
        Collective("all_gather", (1,), 64, "forward"),
        Collective("all_reduce", (1,), 64, "backward"),
        Collective("reduce_scatter", (1,), 64, "backward"),
    ]
    assert ranks4.run(convert_and_back) == [expected] * 4


def test_collectives_inside_dtensor_are_seen(ranks4):
    assert ranks4.run(gather_a_dtensor) == [[Collective("all_gather", (1,), 64, "forward")]] * 4


def test_ddp_reduces_its_gradient(ranks4):
    assert ranks4.run(train_a_linear, "ddp") == [[Collective("all_reduce", (0,), 128, "backward")]] * 4


def test_fsdp_gathers_and_scatters(ranks4):
    issued = ranks4.run(train_a_linear, "fsdp")[0]
    assert Collective("all_gather", (0,), 128, "forward") in issued
    assert Collective("reduce_scatter", (0,), 128, "backward") in issued
