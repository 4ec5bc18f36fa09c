"""Predictions matched with targets by `linear_sum_assignment`, beside a plain run; scipy need not be there."""

import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.run_graph import run
from autopar.ir.trace import trace


def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> tuple[Any, Any]:
    """scipy's, by brute force, of at least as many rows as columns."""
    costs = torch.from_numpy(cost_matrix) if type(cost_matrix) is not Tensor else cost_matrix
    columns = torch.arange(costs.shape[1])
    choices = [torch.tensor(rows) for rows in itertools.permutations(range(len(costs)), len(columns))]
    best = (max if maximize else min)(choices, key=lambda rows: float(costs[rows, columns].sum())).sort()
    return best.values.numpy(), columns[best.indices].numpy()


optimize = ModuleType("scipy.optimize")
vars(optimize)["linear_sum_assignment"] = linear_sum_assignment


def by_tensors(costs: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [tuple(map(torch.as_tensor, linear_sum_assignment(each))) for each in costs.detach().cpu()]


def by_arrays(costs: Tensor) -> list[tuple[Tensor, Tensor]]:
    found = []
    for each in costs:
        rows, columns = linear_sum_assignment(each.detach().cpu().numpy(), maximize=True)
        found.append((torch.from_numpy(rows), torch.from_numpy(columns)))
    return found


def by_name(costs: Tensor) -> list[tuple[Tensor, Tensor]]:
    matches = [optimize.linear_sum_assignment(each.detach().numpy()) for each in costs]
    return [(torch.tensor(i, dtype=torch.int64), torch.tensor(j, dtype=torch.int64)) for i, j in matches]


class Matched(nn.Module):
    """Queries, of which each target has the one that is nearest to it."""

    def __init__(self, match: Callable[[Tensor], list[tuple[Tensor, Tensor]]]) -> None:
        super().__init__()
        self.layer, self.match = nn.Linear(3, 3, dtype=torch.float64), match

    def forward(self, queries: Tensor, targets: Tensor) -> Tensor:
        found = self.layer(queries)
        pairs = self.match(torch.cdist(found, targets))
        return torch.stack([(x[i] - y[j]).square().sum() for x, y, (i, j) in zip(found, targets, pairs)]).mean()


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("match", [by_tensors, by_arrays, by_name])
def test_each_call_matches_anew(
    match: Callable[[Tensor], list[tuple[Tensor, Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", ModuleType("scipy"))
    monkeypatch.setitem(sys.modules, "scipy.optimize", optimize)
    torch.manual_seed(0)
    example, given = ((torch.randn(2, 5, 3).double(), torch.randn(2, 3, 3).double()) for _ in range(2))
    model = Matched(match)
    graph = trace(model, example, {})
    state = dict(model.named_parameters())
    inputs = {item.value.name: x for item, x in zip(graph.of_kind("argument"), given)}
    inputs |= {item.value.name: state[item.fqn] for item in graph.of_kind("parameter")}
    (found,), _ = run(graph, inputs)
    truth = model(*given)
    torch.testing.assert_close(found, truth)
    for one, other in zip(*(torch.autograd.grad(x, list(model.parameters())) for x in (found, truth))):
        torch.testing.assert_close(one, other)
