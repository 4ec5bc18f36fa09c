"""Rows that are written where a mask is True, in another order than that in which they were picked."""

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.run_graph import run
from autopar.ir.trace import trace


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = x.clone()
        out[mask] = (x @ self.w)[mask].flip(0)
        return out.square().mean()


def test_the_model_is_planned_and_gives_the_numbers_of_one_device() -> None:
    torch.manual_seed(0)
    model, x, mask = Written(), torch.randn(6, 5, 4, dtype=torch.float64), torch.rand(6, 5) < 0.5
    graph = trace(model, (x, mask), {})
    assert "aten.masked_scatter.default" in [op.target for op in graph.ops]
    given = {item.value.name: {"w": model.w, "x": x, "mask": mask}[item.fqn] for item in graph.inputs}
    (found,), _ = run(graph, given)
    truth = model(x, mask)
    torch.testing.assert_close(found, truth)
    for one, other in zip(torch.autograd.grad(found, model.w), torch.autograd.grad(truth, model.w)):
        torch.testing.assert_close(one, other)
    autopar.plan(model, "2x2", cluster="free-links", args=(x, mask), time_limit_s=1)  # predicts the memory of backward
