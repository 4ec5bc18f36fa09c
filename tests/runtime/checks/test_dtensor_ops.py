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


def labels_for(x: torch.Tensor) -> torch.Tensor:
    """A class for each row, which lies whole beside a tensor in parts."""
    labels = torch.arange(len(x)) % x.shape[1] // 2
    return distribute_tensor(labels, x.device_mesh, [Replicate(), Replicate()]) if isinstance(x, DTensor) else labels


DIFFERENTIATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mse_loss": lambda x: nn.functional.mse_loss(x, 3 * x.detach()),
    "mse_loss beside a plain tensor": lambda x: nn.functional.mse_loss(x, torch.ones(x.shape).double()),
    "mse_loss, summed": lambda x: nn.functional.mse_loss(x, x.detach() ** 2, reduction="sum"),
    "smooth_l1_loss": lambda x: nn.functional.smooth_l1_loss(x, 9 * x.detach(), beta=2.0),
    "huber_loss": lambda x: nn.functional.huber_loss(x, 9 * x.detach(), delta=2.0),
    "binary_cross_entropy": lambda x: nn.functional.binary_cross_entropy(x.sigmoid(), (3 * x.detach()).sigmoid()),
    "with logits": lambda x: nn.functional.binary_cross_entropy_with_logits(x, (3 * x.detach()).sigmoid()),
    "cross_entropy": lambda x: nn.functional.cross_entropy(x, labels_for(x)),
    "cross_entropy of plain labels": lambda x: nn.functional.cross_entropy(x, torch.arange(len(x)) % 3, ignore_index=1),
    "cross_entropy, some ignored": lambda x: nn.functional.cross_entropy(x, labels_for(x), ignore_index=1),
    "cross_entropy, weighted": lambda x: nn.functional.cross_entropy(x, labels_for(x), weight=x.detach()[0].exp()),
    "cross_entropy, weighted, summed": lambda x: nn.functional.cross_entropy(
        x, labels_for(x), weight=x.detach()[0].exp(), reduction="sum", ignore_index=2
    ),
    "cumsum from the last dim": lambda x: x.cumsum(-1).square().sum(),
    "argmax": lambda x: x.sum() * x.argmax(-1).sum() + x.argmin(0).sum(),
    "amax": lambda x: x.amax().square(),
    "max and min": lambda x: x.max() * x.min(),
    "the largest entry": lambda x: x.norm(float("inf")),
    "the smallest entry": lambda x: torch.linalg.vector_norm(x, -float("inf")),
    "of no dims, which are all": lambda x: x.sum([], keepdim=True).square().sum() + x.mean(()),
    "a quantile": lambda x: x.quantile(0.3),
}


def differentiated(shape: tuple[int, int]) -> None:
    """Each function of a tensor in each layout, which may not divide, beside all of it: the value and the gradient."""
    handle_scalars_and_random_ops()
    mesh = device_mesh((2, 2), ("a", "b"))
    for name, function in DIFFERENTIATED.items():
        given = torch.linspace(-1, 2, 48, dtype=torch.float64)[: shape[0] * shape[1]].view(shape).sin()
        expected = function(single := given.clone().requires_grad_())
        expected.backward()
        for layout in LAYOUTS:
            found = function(x := distribute_tensor(given, mesh, layout).requires_grad_())
            found.backward()
            assert isinstance(found, DTensor) and isinstance(x.grad, DTensor)
            torch.testing.assert_close(found.full_tensor(), expected, msg=f"{name}, {layout}")
            torch.testing.assert_close(x.grad.full_tensor(), single.grad, msg=f"{name}, gradient, {layout}")


@pytest.mark.multirank
@pytest.mark.parametrize("shape", [(8, 6), (3, 4), (5, 7)])
def test_values_and_gradients_are_those_of_one_device(ranks4: Ranks, shape: tuple[int, int]) -> None:
    """mse_loss of a weight had another gradient, where parts differ in size another value; argmax waited forever."""
    ranks4.run(differentiated, shape, timeout_s=60)


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
        for refusal in refusals:
            assert "full_tensor()." in refusal and "on every rank" in refusal and "pins={name: 'BB'}" in refusal


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


BESIDE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "lerp_": lambda x, plain: x.lerp_(x.detach() * 2, plain),
    "lerp": lambda x, plain: torch.lerp(x, plain, plain),
    "clamp": lambda x, plain: torch.clamp(x, -plain, plain),
    "clamp_": lambda x, plain: x.clamp_(max=plain),
    "pow": lambda x, plain: x.abs() ** plain,
    "remainder and fmod": lambda x, plain: torch.remainder(x, plain) + torch.fmod(x, plain),
    "angles": lambda x, plain: torch.atan2(x, plain) + torch.hypot(x, plain) + torch.copysign(plain, x),
    "largest of both": lambda x, plain: torch.fmax(x, plain) - torch.fmin(x, plain) + torch.floor_divide(x, plain),
    "logical": lambda x, plain: ((x > 0) ^ (plain > 0.5)).float() + torch.logical_xor(x > 0, plain > 0.5) + 0 * x,
    "lerp of lists": lambda x, plain: (torch._foreach_lerp_([x], [x.detach() * 3], [plain]), x)[1],
    "powers of lists": lambda x, plain: (torch._foreach_pow_([y := x.abs()], [plain]), y)[1],
    "largest of lists": lambda x, plain: (torch._foreach_maximum_([x], [plain]), x)[1],
}


def computed_beside(names: list[str]) -> None:
    handle_plain_operands()
    mesh = device_mesh((2, 2), ("a", "b"))
    torch.manual_seed(0)
    plain = torch.rand(8, 6) + 0.1
    for name in names:
        expected = BESIDE[name](whole(), plain)
        for layout in LAYOUTS:
            found = BESIDE[name](distribute_tensor(whole(), mesh, layout), plain)
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.full_tensor(), expected, msg=f"{name}, {layout}")


@pytest.mark.multirank
def test_a_plain_tensor_of_the_script_beside_a_weight_is_computed_with(ranks4: Ranks) -> None:
    ranks4.run(computed_beside, [*BESIDE], timeout_s=60)


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
