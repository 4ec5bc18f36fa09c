"""A tensor outside of a model that would get a gradient on one device is refused, and no other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.gradients.outside_tensors import OutsideGradientsRefused
from autopar.ir.trace import trace

PARAMETER, TENSOR, FROZEN = nn.Parameter(torch.ones(8)), torch.ones(8, requires_grad=True), torch.ones(8)
COMPUTED = PARAMETER * 2

Function = Callable[[Tensor], Tensor]


@torch.no_grad()
def without_gradient(x: Tensor) -> Tensor:
    return x * PARAMETER


READS: dict[str, Function] = {  # of a model: (rows, 8) -> a tensor
    "parameter": lambda x: x * PARAMETER,
    "leaf": lambda x: x + TENSOR,
    "computed": lambda x: x - COMPUTED,
    "computed in forward": lambda x: x * (TENSOR + 1),
    "in a list": lambda x: torch.cat([x, PARAMETER[None]]),
    "in place": lambda x: (x * 1).mul_(PARAMETER),
    "of a parameter": lambda x: nn.functional.linear(x, PARAMETER.expand(8, 8)),
}
READS_ALONE: dict[str, Function] = {
    "detached": lambda x: x * PARAMETER.detach() * TENSOR.detach(),
    "frozen": lambda x: x * FROZEN,
    "without gradient": without_gradient,
    "its shape": lambda x: x * torch.zeros_like(PARAMETER) + PARAMETER.shape[0] + x.new_ones(PARAMETER.shape),
    "comparison": lambda x: x * (x > PARAMETER),
    "its dtype": lambda x: x.to(PARAMETER.dtype).type_as(PARAMETER).view_as(x),
}


class Model(nn.Module):
    def __init__(self, read: Function) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.read(x))


def gets_gradient(read: Function) -> bool:
    """Whether one of those outside gets a gradient of the model on one device."""
    outside = PARAMETER, TENSOR, FROZEN
    for x in outside:
        x.grad = None
    out = Model(read)(torch.randn(4, 8))
    out.sum().backward(retain_graph=True)
    return any(x.grad is not None and bool(x.grad.any()) for x in outside)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_would_get_a_gradient_is_refused(read: Function) -> None:
    assert gets_gradient(read)
    with OutsideGradientsRefused(), pytest.raises(TraceError, match=r"test_outside_tensors.py:\d+.*it would get none"):
        trace(Model(read).to("meta"), (torch.empty(4, 8, device="meta"),), {})


@pytest.mark.parametrize("read", READS_ALONE.values(), ids=READS_ALONE)
def test_what_gets_none_is_read(read: Function) -> None:
    assert not gets_gradient(read)
    with OutsideGradientsRefused():
        trace(Model(read).to("meta"), (torch.empty(4, 8, device="meta"),), {})


def test_a_hook_reads_one_too() -> None:
    model = Model(lambda x: x)
    model.linear.register_forward_hook(lambda module, args, output: output * PARAMETER)
    with OutsideGradientsRefused(), pytest.raises(TraceError, match="it would get none"):
        trace(model, (torch.randn(4, 8),), {})
