"""Which output of a model is its loss."""

from collections import namedtuple
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.trace import trace

Losses = namedtuple("Losses", ("part", "loss"))


class Returning(nn.Module):
    """What `function` makes of a layer's output."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self.layer(x))


def kept(function: Callable) -> Graph:
    return loss_only(trace(Returning(function), (torch.randn(2, 4),), {}))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: {"part": y.mean(), "loss": y.exp().sum()},
        lambda y: Losses(y.mean(), y.exp().sum()),
        lambda y: (y, {"part": y.mean(), "loss": y.exp().sum()}),
        lambda y: (y.exp().sum(), y.mean(), {"loss": y.mean()}),
        lambda y: {"total": y.exp().sum(), "seen": y.detach().mean(), "parts": {"loss": y.mean()}},
    ],
    ids=["dict", "named tuple", "nested", "first", "parts"],
)
def test_the_loss_is_what_is_named_so_or_the_first(function: Callable) -> None:
    graph = kept(function)
    assert [op.target for op in graph.ops if op.outputs[0] in graph.outputs] == ["aten.sum.default"]


def test_several_names_of_which_none_is_loss_are_refused() -> None:
    with pytest.raises(AutoparError, match=r"several numbers with a gradient by name, first, second: .* named loss"):
        kept(lambda y: {"first": y.mean(), "second": y.sum()})
