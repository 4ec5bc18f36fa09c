"""A method of tensors that a script replaced does in a trace what it does on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.run_graph import run
from autopar.ir.trace import trace

TANH, MUL, CUDA = torch.Tensor.tanh, torch.Tensor.mul, torch.Tensor.cuda


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh().mul(2)).tanh().cuda()


REPLACED: dict[str, dict[str, Callable[..., Any]]] = {
    "halved": {"tanh": lambda x: TANH(x) * 0.5, "cuda": lambda x: x},
    "each by another": {"tanh": lambda x: TANH(x).mul(3), "mul": lambda x, y: MUL(x, y) + 1, "cuda": lambda x: x},
    "not by itself": {"tanh": lambda x: x.relu() + 1, "cuda": lambda x, device=None: MUL(x, 3)},
}


@pytest.mark.parametrize("methods", REPLACED.values(), ids=REPLACED)
def test_it_was_applied_once_more_for_each_function_mode(
    methods: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Model(), torch.randn(2, 4)
    for name, method in methods.items():
        monkeypatch.setattr(torch.Tensor, name, method)
    expected = model(x)
    graph = trace(model, (x,), {})
    assert all(vars(torch.Tensor)[name] is method for name, method in methods.items())
    monkeypatch.undo()
    weights = dict(model.named_parameters())
    (found,), _ = run(graph, {item.value.name: weights.get(item.fqn, x) for item in graph.inputs})
    torch.testing.assert_close(found, expected)
