"""What a rank has in the place of other stages' parameters: numbered, counted and updated as on one device."""

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.pipeline.parameter_elsewhere import (
    ParameterElsewhere,
    leave_out_of_optimizers,
    parameter_elsewhere,
)


def elsewhere(*shape: int) -> nn.Parameter:
    return parameter_elsewhere(torch.empty(shape, device="meta", requires_grad=True), "a.weight", torch.device("cpu"))


def test_has_what_a_parameter_has_but_content() -> None:
    p = elsewhere(3, 4)
    assert isinstance(p, nn.Parameter) and isinstance(p, ParameterElsewhere) and p.requires_grad
    assert p.shape == (3, 4) and p.numel() == 12 and p.dtype == torch.float32 and p.device.type == "cpu"
    assert p.grad is not None and p.grad.shape == p.shape
    assert isinstance(copy.deepcopy(p), nn.Parameter)
    assert (p.detach() * 2 + 1).mean(0).shape == (4,)
    assert "a.weight" in repr(p) and p.to_local().numel() == 0


def test_writes_do_nothing() -> None:
    p = elsewhere(3, 4)
    with torch.no_grad():
        assert p.mul_(2).add_(torch.ones(4)) is p
        p -= 0.1 * p.grad
        p[0] = 0
        p.copy_(torch.ones(3, 4))
    p.data.clamp_(-1, 1)
    p.data -= 0.1 * p.grad.data
    p.data = torch.ones(3, 4)
    p.grad = None
    p.grad.zero_()
    nn.init.zeros_(p)
    torch._foreach_mul_([p.detach()], 2)


def test_lists_with_some_that_are_here() -> None:
    here, p = torch.ones(2), elsewhere(3).detach()
    torch._foreach_mul_([here, p], 2)
    assert here.tolist() == [2, 2]
    one, other = torch._foreach_add([here, p], [torch.ones(2), elsewhere(3).detach()])
    assert one.tolist() == [3, 3] and isinstance(other, ParameterElsewhere)


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p.sum().item(),
        lambda p: float(p.norm()),
        lambda p: p.full_tensor(),
        lambda p: torch.ones(3, 4).add_(p.detach()),
        lambda p: torch.add(torch.ones(3, 4), p.detach(), out=torch.ones(3, 4)),
        lambda p: torch.ones(3, 4).data.copy_(p.detach()),
        lambda p: (torch.ones(3, 4, requires_grad=True) * p).sum(),
        lambda p: torch.stack([p.grad.norm(), torch.ones(())]).norm().item(),
        lambda p: torch.nonzero(p),
        lambda p: p.tolist(),
        lambda p: p.detach().numpy(),
        lambda p: bool((p > 0).all()),
        lambda p: copy.copy(p),
        lambda p: torch.equal(p, p),
        lambda p: f"{p.norm():.3f}",
    ],
)
def test_reads_are_refused(read) -> None:
    with pytest.raises(autopar.AutoparError, match=r"a\.weight.*another stage.*full_state_dict"):
        read(elsewhere(3, 4))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_take_what_is_here(kind) -> None:
    leave_out_of_optimizers()
    here = nn.Parameter(torch.ones(2))
    groups = [{"params": [elsewhere(3)], "lr": 0.1}, {"params": iter([elsewhere(3), here])}, {"params": elsewhere(3)}]
    optimizer = kind(groups, lr=0.2)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1, 0]
    named = kind([("a.weight", elsewhere(3)), ("b", here)], lr=0.2)
    assert named.param_groups[0]["param_names"] == ["b"]
