"""`torch.tensor` of a list of tensors that the forward computes, beside a run of the model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.run_graph import run
from autopar.ir.trace import trace

MADE: dict[str, Callable[[Tensor], Any]] = {
    "maxima": lambda y: torch.tensor([row.max() for row in y.detach()]),
    "of rows and numbers": lambda y: torch.tensor([[row.sum(), 2] for row in y]),
    "integers": lambda y: torch.tensor([y.argmax() + 1, 3]),
    "rounded": lambda y: torch.tensor([y.sum(), y[0, 0]], dtype=torch.float32, device=y.device),
    "as_tensor of floats and integers": lambda y: torch.as_tensor([y.argmax(), 1.5]),
}


class Model(nn.Module):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(3, 3, dtype=torch.float64), make

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        made = self.make(y)
        return (y * made.sum()).sum(), made


@pytest.mark.parametrize("name", MADE)
def test_the_numbers_are_those_of_each_call(name: str) -> None:
    torch.manual_seed(0)
    example, given = torch.randn(2, 4, 3, dtype=torch.float64)
    model = Model(MADE[name])
    graph = trace(model, (example,), {})
    state = dict(model.named_parameters())
    inputs = {graph.of_kind("argument")[0].value.name: given}
    inputs |= {item.value.name: state[item.fqn] for item in graph.of_kind("parameter")}
    for found, truth in zip(run(graph, inputs)[0], model(given), strict=True):
        assert found.dtype == truth.dtype
        torch.testing.assert_close(found, truth)
