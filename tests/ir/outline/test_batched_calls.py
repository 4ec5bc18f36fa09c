"""A model that calls torch.vmap, and its gradients, are those of one device."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.run_graph import run
from autopar.ir.trace import trace

Function = Callable[[Tensor, Tensor], Tensor]


def without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.vmap(lambda row: torch.tanh(row @ w[0]))(x)
    return y * (x @ w[0])


# Of x [8, 4] and w [8, 4, 4].
BATCHED: dict[str, Function] = {
    "rows": lambda x, w: torch.vmap(lambda row: torch.tanh(row @ w[0]).sum() * row)(x),
    "two batches": lambda x, w: torch.vmap(lambda row, own: F.softmax(row @ own, -1))(x, w),
    "an ensemble": lambda x, w: torch.vmap(lambda own: F.gelu(own @ x.T).mean(1), in_dims=2)(w),
    "one within another": lambda x, w: torch.vmap(lambda a: torch.vmap(lambda b: (a * b).sum() * a @ w[0])(x))(x),
    "one after another": lambda x, w: torch.vmap(lambda row: row @ w[1])(torch.vmap(lambda row: row @ w[0])(x)),
    "attention": lambda x, w: torch.vmap(lambda own: F.scaled_dot_product_attention(own @ w[0], own, own))(w),
    "a norm": lambda x, w: torch.vmap(lambda row: F.layer_norm(row @ w[0], [4], w[1, 0]))(x),
    "in place": lambda x, w: torch.vmap(lambda row: (row @ w[0]).mul_(2).add_(row))(x),
    "two results": lambda x, w: sum(torch.vmap(lambda row: (row @ w[0], row.sin()))(x), torch.zeros(())),
    "constants": lambda x, w: torch.vmap(lambda i: (i > torch.arange(8)) * 1.0)(torch.arange(8)).to(x) @ x @ w[0],
    "a loss": lambda x, w: torch.vmap(lambda row, label: F.cross_entropy(row @ w[0], label))(x, torch.arange(8) % 4),
    "random numbers": lambda x, w: torch.vmap(lambda row: F.dropout(row @ w[0], 0.5), randomness="different")(x),
    "without gradient": without_gradient,
}


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


@pytest.mark.parametrize("name", BATCHED)
def test_batches_and_their_gradients(name: str) -> None:
    given, other = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Model(BATCHED[name])
    graph = trace(model, (given,), {})
    for x in (given, other):
        values = {"parameter": model.w, "argument": x}
        torch.manual_seed(0)
        truth = model(x)
        torch.manual_seed(0)
        found = run(graph, {item.value.name: values[item.kind] for item in graph.inputs if item.kind in values})[0][0]
        torch.testing.assert_close(found, truth)
        for own, expected in zip(*(torch.autograd.grad(y.square().sum(), model.w) for y in (found, truth))):
            torch.testing.assert_close(own, expected)


REFUSED: dict[str, Function] = {
    "take a gradient by torch.autograd.grad": lambda x, w: torch.vmap(torch.func.grad(lambda y: (y @ w[0]).sum()))(x),
    r"torch\.vmap\(out_dims=0\)": lambda x, w: torch.vmap(lambda row: row @ w[0], out_dims=1)(x),
    "write the batched computation out": lambda x, w: torch.vmap(without_gradient, in_dims=(0, None))(x, w),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(Model(REFUSED[message]), (torch.randn(8, 4, dtype=torch.float64),), {})


def test_a_batch_under_autocast_is_refused() -> None:
    model = Model(BATCHED["two batches"]).float()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TraceError, match=r"torch.vmap is called under autocast"):
        trace(model, (torch.randn(8, 4),), {})
