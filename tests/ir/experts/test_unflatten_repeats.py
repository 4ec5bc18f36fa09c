"""Elementwise ops on repeated tensors are computed on the dims that they had."""

import pytest
import torch
from torch import nn

from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model


class Program(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(3, 4, 5)), function

    def forward(self, x, y):
        return self.function(x, y, self.weight)


PROGRAMS = {
    "all experts": lambda x, y, w: torch.bmm((x.repeat(3, 1) * y.t().reshape(-1, 1)).view(3, -1, 4), w),
    "of numbers too": lambda x, y, w: torch.bmm((x.repeat(3, 1) * 2).view(3, -1, 4), w),
}
OTHERS = {
    "repeated twice": lambda x, y, w: torch.bmm((x[:1].repeat(6, 1) * y.t().reshape(-1, 1)).view(3, -1, 4), w),
    "other copies": lambda x, y, w: torch.bmm((x.repeat(3, 1) * y.t().reshape(-1, 1)).view(2, 3, 4), w[:2]),
    "read elsewhere": lambda x, y, w: (z := x.repeat(3, 1) * y.t().reshape(-1, 1)).view(3, -1, 4) @ w + z.sum(),
    "no repeat": lambda x, y, w: (torch.cat([x, x, x]) * y.t().reshape(-1, 1)).view(3, -1, 4) @ w,
}


@pytest.mark.parametrize("name", [*PROGRAMS, *OTHERS])
def test_it_computes_the_same(name: str) -> None:
    model, given = Program((PROGRAMS | OTHERS)[name]), (torch.randn(2, 4), torch.randn(2, 3))
    graph = trace(model, given, {})
    assert_same_as_model(graph, model, given, {}, tolerance=1e-6)
    assert any(op.target == "aten.repeat.default" for op in graph.ops) == (name in OTHERS and name != "no repeat")
