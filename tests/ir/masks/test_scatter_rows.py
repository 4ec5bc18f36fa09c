"""Rows that are written where a mask is True, in another order than that in which they were picked."""

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Graph
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


class OneRow(Written):
    """A learnt row wherever the mask is True, as of a mask token."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out, other = x @ self.w, x.clone()
        out[mask] = self.w[0]
        other[mask] = self.w[1:2]
        other[other > 1] = self.w[0, 0]
        return (out * other).square().mean()


class OnePicked(Written):
    """As many rows as are picked, which may be one."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = x.clone()
        out[mask] = (x @ self.w)[mask]
        return out.square().mean()


def drawn() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 5, 4, dtype=torch.float64), torch.rand(6, 5) < 0.5


def assert_as_on_one_device(model: Written, graph: Graph, x: Tensor, mask: Tensor) -> None:
    given = {item.value.name: {"w": model.w, "x": x, "mask": mask}[item.fqn] for item in graph.inputs}
    (found,), _ = run(graph, given)
    truth = model(x, mask)
    torch.testing.assert_close(found, truth)
    for one, other in zip(torch.autograd.grad(found, model.w), torch.autograd.grad(truth, model.w)):
        torch.testing.assert_close(one, other)


def test_one_row_for_all_places_is_planned_and_right_for_other_masks() -> None:
    torch.manual_seed(0)
    model, given = OneRow(), drawn()
    graph = trace(model, given, {})
    assert [op.target for op in graph.ops].count("aten.where.self") == 3
    for x, mask in (given, drawn()):
        assert_as_on_one_device(model, graph, x, mask)
    autopar.plan(model, "2x2", cluster="free-links", args=given, time_limit_s=1)  # predicts the memory of backward


def test_one_row_that_is_picked_stands_for_any_number() -> None:
    torch.manual_seed(0)
    model, (x, mask) = OnePicked(), drawn()
    graph = trace(model, (x, torch.arange(30).view(6, 5) == 7), {})
    assert_as_on_one_device(model, graph, x, mask)


def test_the_model_is_planned_and_gives_the_numbers_of_one_device() -> None:
    torch.manual_seed(0)
    model, (x, mask) = Written(), drawn()
    graph = trace(model, (x, mask), {})
    assert "aten.masked_scatter.default" in [op.target for op in graph.ops]
    assert_as_on_one_device(model, graph, x, mask)
    autopar.plan(model, "2x2", cluster="free-links", args=(x, mask), time_limit_s=1)  # predicts the memory of backward
