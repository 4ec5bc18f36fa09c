"""Checks of what a model computes, which raise an error or ask for finite numbers: each call makes them again.

PYTEST_DONT_REWRITE: the asserts here are those of models.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError, TraceError
from autopar.ir.guards.guard_ops import GUARDED
from autopar.ir.run_graph import run
from autopar.ir.trace import trace

Tensor = torch.Tensor


class Checked(nn.Module):
    """A layer, of whose result `check` is asked."""

    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(3, 3), check

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.check(y)
        return y.square().mean()


def asserts(y: Tensor) -> None:
    assert not torch.isnan(y).any(), f"not a number, of shape {y.shape}"


def asserts_two(y: Tensor) -> None:
    assert y.isnan().sum() == 0 and y.abs().max() < 1e6


def raises(y: Tensor) -> None:
    if torch.isinf(y).any() or y.isnan().any():
        said = "not finite"
        raise ValueError(said)


def raises_of_a_number(y: Tensor) -> None:
    if not math.isfinite(y.sum().item()):
        raise FloatingPointError


def raises_unless(y: Tensor) -> None:
    if y.isfinite().all():
        return
    raise ValueError


def clamps(y: Tensor) -> None:
    if not torch.isfinite(y).all():
        y.clamp_(-1, 1)


def replaces(y: Tensor) -> None:
    if (y.isinf() | ~torch.isfinite(y)).any() or torch.isnan(y).any().item():
        y.nan_to_num_()


def clamps_large(y: Tensor) -> None:
    if y.sum() > 1e3:
        y.clamp_(-1, 1)


@pytest.mark.parametrize("check", [asserts, asserts_two, raises, raises_unless, clamps, replaces])
def test_a_check_of_results_holds_at_each_call(check: Callable[[Tensor], None]) -> None:
    model = Checked(check)
    graph = trace(model, (torch.randn(4, 3),), {})
    assert GUARDED in [op.target for op in graph.ops], "the check is part of the graph"
    x = torch.randn(4, 3)
    state = dict(model.named_parameters())
    inputs = {item.value.name: state.get(item.fqn, x) for item in graph.inputs}
    torch.testing.assert_close(run(graph, inputs)[0][0], model(x))
    bad = {name: given if given is not x else x.fill_(math.nan) for name, given in inputs.items()}
    with pytest.raises(AutoparError, match=r"test_raising_branches\.py:"):
        run(graph, bad)


@pytest.mark.parametrize("check", [clamps_large, raises_of_a_number])
def test_a_branch_of_which_both_ways_go_on_is_refused(check: Callable[[Tensor], None]) -> None:
    with pytest.raises(TraceError, match=r"branches on the values of a tensor|depends on the values|cannot be traced"):
        trace(Checked(check), (torch.randn(4, 3),), {})
