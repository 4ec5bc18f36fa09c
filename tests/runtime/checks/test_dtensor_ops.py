"""Scalars of DTensors that are read, and random numbers for them, are those of one device or refused."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.errors import AutoparError
from autopar.runtime.checks.dtensor_ops import handle_scalars_and_random_ops
from autopar.runtime.checks.plain_operands import handle_plain_operands
from autopar.runtime.pipeline.trainer import pipeline_mesh
from autopar.torch_compat import as_torch_does
from tests.workers import Ranks, device_mesh

LAYOUTS = ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()])
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "normal_ of rows": lambda x: (x[2:5].normal_(), x)[1],
    "exponential_": lambda x: x.exponential_(),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: nn.functional.dropout(x, 0.4),
}


def whole() -> torch.Tensor:
    return torch.linspace(-1, 1, 48).view(8, 6)


def drawn(name: str, number: int) -> torch.Tensor:
    """On each rank, the whole of what is drawn for a tensor in parts; the ranks' own generators differ."""
    handle_scalars_and_random_ops()
    x = distribute_tensor(whole(), device_mesh((2, 2), ("a", "b")), LAYOUTS[number])
    torch.manual_seed(torch.distributed.get_rank())
    return DRAWS[name](x).full_tensor()


@pytest.mark.multirank
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_of_one_device(ranks4: Ranks, name: str) -> None:
    torch.manual_seed(0)
    expected = DRAWS[name](whole())
    for number in range(len(LAYOUTS)):
        for found in ranks4.run(drawn, name, number):
            assert torch.equal(found, expected)


def read(has_mean: bool) -> list[object]:
    handle_scalars_and_random_ops()
    mesh = device_mesh((2, 2), ("a", "b"))
    parts = distribute_tensor(whole(), mesh, [Shard(0), Shard(1)])
    replicated = distribute_tensor(whole(), mesh, [Replicate(), Replicate()])
    found: list[object] = [replicated.mean().item(), bool((parts > 2).any().full_tensor())]
    try:
        found.append((parts.mean() if has_mean else parts.norm()).item())
    except AutoparError as error:
        found.append(str(error))
    with as_torch_does(torch.ops.aten._local_scalar_dense.default):
        return [*found, parts.sum().item()]


@pytest.mark.multirank
@pytest.mark.parametrize("has_mean", [False, True])
def test_a_scalar_in_parts_is_not_read(ranks4: Ranks, has_mean: bool) -> None:
    results = ranks4.run(read, has_mean)
    for mean, is_larger, refusal, _ in results:
        assert mean == pytest.approx(0, abs=1e-6) and is_larger is False
        assert "full_tensor() first, on every rank" in refusal
    assert len({own for *_, own in results}) > 1  # what torch alone reads


def as_plain() -> list[object]:
    handle_scalars_and_random_ops()
    mesh = device_mesh((2, 2), ("a", "b"))
    parts = distribute_tensor(whole(), mesh, [Shard(0), Shard(1)])
    replicated = distribute_tensor(whole(), mesh, [Replicate(), Replicate()])
    found: list[object] = [replicated.tolist(), replicated.numpy().tolist()]
    for method in (parts.tolist, parts.numpy, parts.detach().__array__):
        with pytest.raises(AutoparError) as error:
            method()
        found.append(str(error.value))
    return found


@pytest.mark.multirank
def test_lists_and_arrays_are_made_of_what_is_whole(ranks4: Ranks) -> None:
    for a, b, *refusals in ranks4.run(as_plain):
        assert a == b == whole().tolist()
        assert all("full_tensor()." in refusal and "on every rank" in refusal for refusal in refusals)


def written_in_lists() -> None:
    """Whole state beside weights in parts, as optimizers update lists of both."""
    handle_plain_operands()
    mesh = device_mesh((2, 2), ("a", "b"))
    parts = [distribute_tensor(whole(), mesh, [Shard(0), Shard(1)]) for _ in range(2)]
    plain = [whole() + 1, whole() * 2]
    torch._foreach_add_(parts, plain, alpha=0.5)
    torch._foreach_addcmul_(parts, plain, plain, value=0.1)
    for part, other in zip(parts, plain):
        assert torch.allclose(part.full_tensor(), whole() + 0.5 * other + 0.1 * other * other)
    for write in (lambda: torch._foreach_mul_(plain, parts), lambda: torch._foreach_lerp_(plain, parts, 0.1)):
        with pytest.raises(AutoparError, match="into a plain tensor"):
            write()
    with pytest.raises(AutoparError, match="into a plain tensor"):
        torch.zeros(len(whole()), len(whole())).addmm_(parts[0], parts[0].t())  # as Shampoo of libraries


@pytest.mark.multirank
def test_lists_of_weights_are_written_to_from_whole_tensors_and_not_the_other_way(ranks4: Ranks) -> None:
    ranks4.run(written_in_lists)


def test_plain_tensors_are_left_alone() -> None:
    handle_scalars_and_random_ops()
    assert torch.ones(3).sum().item() == 3 and not isinstance(torch.rand_like(torch.ones(2)), DTensor)


def found_infinite() -> float:
    """What GradScaler is told, of gradients that lie on one of two equal meshes, on each stage on another."""
    handle_scalars_and_random_ops()
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")) for _ in range(2)]
    for mesh in meshes:
        pipeline_mesh(mesh)
    stage = meshes[0].get_local_rank("pp")
    part = torch.full((2,), float("inf") if dist.get_rank() == 3 else 1.0)
    gradient = DTensor.from_local(part, meshes[stage]["dp"], [Shard(0)])
    found = torch.zeros(())
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default([gradient], found, torch.ones(()))
    return found.item()


@pytest.mark.multirank
def test_stages_whose_gradients_lie_on_equal_meshes_agree_on_a_scale(ranks4: Ranks) -> None:
    assert ranks4.run(found_infinite, timeout_s=60.0) == [1.0] * 4
