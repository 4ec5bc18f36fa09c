"""The graph of another size has the names of the first one, to which plans refer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.ir.trace_with_loss import traced
from autopar.runtime.sizes.call_kind import CallKind


class Written(nn.Module):
    """A model that writes a part of a mask: with a symbol for the batch, an export slices the mask twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:2], device=x.device)
        mask[:, :3] = 0
        hidden = self.first(x[:, 1:])
        return self.last(hidden[:, 1:]).mean(-1) * mask.gather(1, order)[:, 2:]


def graph_of(kind: CallKind, rows: int) -> Graph:
    model = Written().to("meta")
    args = (torch.zeros(rows, 6, 8, device="meta"), torch.zeros(rows, 6, dtype=torch.int64, device="meta"))

    def trace(how: Callable[..., Any], *more: Any) -> Any:
        return how(model, None, args, {}, *more)

    return kind.graph((args, {}), trace) if kind.made_of else trace(traced)


def test_values_of_another_size_have_the_names_of_the_first() -> None:
    kind = CallKind(((8, 6, 8), (8, 6)))
    kind.made_of = first = graph_of(kind, 8)
    for rows in (12, 10):
        names = {op.name for op in graph_of(kind, rows).ops}
        assert names == {op.name for op in first.ops}
