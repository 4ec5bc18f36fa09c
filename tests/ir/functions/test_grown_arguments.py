"""What a forward leaves in its arguments is in its results, or refused: the caller's own list would stay empty."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.trace import trace


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor, into: Any) -> Any:
        h = self.linear(x)
        match self.how:
            case "appends":
                into.append(h)
            case "sets" | "sets and returns":
                into["h"] = h
            case "nested":
                into["states"].append(h)
            case "pops":
                into.pop("x")
            case "replaces" | "replaces and returns":
                into["x"] = h
        return (h.sum(), into) if self.how.endswith("and returns") else h.sum()


def made(how: str) -> Any:
    x = torch.ones(2, 4)
    return [x] if how == "appends" else {"x": x, "states": [x]}


@pytest.mark.parametrize("how", ["appends", "sets", "nested", "replaces"])
def test_tensors_that_only_the_callers_own_would_have_are_refused(how: str) -> None:
    with pytest.raises(TraceError, match=r"puts a tensor of shape .* into a (list|dict) .* would stay as it is"):
        trace(Model(how), (torch.ones(2, 4), made(how)), {})
    with pytest.raises(TraceError, match="puts a tensor of shape"):
        trace(Model(how), (torch.ones(2, 4),), {"into": made(how)})


@pytest.mark.parametrize("how", ["sets and returns", "replaces and returns", "pops", "reads"])
def test_what_loses_nothing_is_traced(how: str) -> None:
    assert trace(Model(how), (torch.ones(2, 4), made(how)), {}).ops
