"""Ops that write to given tensors (`out=`, `detach_`): the graph gives what the model gives, or names the op."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.run_graph import run
from autopar.ir.trace import trace

EMPTY = torch.empty
LONG = torch.long


def sin_of_every_other_column(x, y):
    table = torch.zeros(8, 16)
    torch.sin(x, out=table[:, 0::2])
    torch.cos(x, out=table[:, 1::2])
    return table


def returned_and_written(x, y):
    c = EMPTY(8, 8)
    return c, torch.add(x, y, alpha=2, out=c)


def two_outputs(x, y):
    values, indices = EMPTY(8), EMPTY(8, dtype=LONG)
    torch.max(x, 1, out=(values, indices))
    return values, indices


def own_input(x, y):
    c = x.clone()
    torch.addmm(c, x, y, out=c)
    return c


def other_dtypes(x, y):
    wide, flags = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 8)
    torch.mul(x, y, out=wide)
    torch.gt(x, y, out=flags)
    return wide, flags


def through_a_view(x, y):
    c = EMPTY(2, 8, 8)
    torch.cat([x, y], out=c.view(16, 8))
    return c


def without_a_size(x, y):
    return torch.sort(x, dim=-1, descending=True, out=(EMPTY(0), EMPTY(0, dtype=LONG)))


def made_of_numbers(x, y):
    c = EMPTY(8, 8)
    torch.full((8, 8), 2.0, out=c)
    torch.linspace(0, 1, 8, out=c[0])
    torch.arange(8, out=c[1])
    return c + x


OVERLOADS = {
    "mean": lambda x, y: torch.mean(x, 1, out=EMPTY(8)),
    "std": lambda x, y: torch.std(x, 1, out=EMPTY(8)),
    "norm": lambda x, y: torch.linalg.vector_norm(x, dim=1, out=EMPTY(8)),
    "qr": lambda x, y: torch.linalg.qr(x, out=(EMPTY(8, 8), EMPTY(8, 8))),
    "topk": lambda x, y: torch.topk(x, 2, out=(EMPTY(8, 2), EMPTY(8, 2, dtype=LONG))),
    "pow of number": lambda x, y: torch.pow(2, x, out=EMPTY(8, 8)),
    "where": lambda x, y: torch.where(x > 0, x, y, out=EMPTY(8, 8)),
    "gather": lambda x, y: torch.gather(x, 0, torch.zeros(8, 8, dtype=LONG), out=EMPTY(8, 8)),
    "stack": lambda x, y: torch.stack([x, y], out=EMPTY(2, 8, 8)),
}
FORWARDS = [
    sin_of_every_other_column,
    returned_and_written,
    two_outputs,
    own_input,
    other_dtypes,
    through_a_view,
    without_a_size,
    made_of_numbers,
]


def traced(forward: Callable, *args: torch.Tensor) -> Graph:
    class Model(nn.Module):
        def forward(self, x, y):
            return forward(x, y)

    return trace(Model(), args, {})


@pytest.mark.parametrize(
    "forward",
    [*(pytest.param(f, id=f.__name__) for f in FORWARDS), *(pytest.param(f, id=n) for n, f in OVERLOADS.items())],
)
def test_what_is_written_by_keyword(forward: Callable) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    found, _ = run(traced(forward, x, y), {"x": x, "y": y})
    expected = forward(x, y)
    for one, truth in zip(found, expected if isinstance(expected, tuple) else (expected,)):
        torch.testing.assert_close(one, truth, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x, y: torch.exp(x, out=EMPTY(3)), r"aten.exp.out has a result of shape \[8, 8\] .* given as out="),
        (lambda x, y: torch.sin(x, out=y), r"changes argument y in place"),
        (lambda x, y: torch._foreach_add_([x.clone()], 1.0) or x, r"_foreach_add_.Scalar writes to a list of tensors"),
    ],
    ids=["another shape", "argument", "list"],
)
def test_what_cannot_be_written_is_refused_by_name(forward: Callable, words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        traced(forward, torch.randn(8, 8), torch.randn(8, 8))


def test_detached_in_place_there_is_no_gradient() -> None:
    def forward(x, y):
        state = x * y
        state.detach_()
        return state * x

    x, y = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    (found,), _ = run(traced(forward, x, y), {"x": x, "y": y})
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient, (x * y).detach())


def _masked_score(x, w):
    score = (torch.tanh(x) @ w).squeeze(-1)
    score.data.masked_fill_(x[:, 0] > 1, -float("inf"))
    score.data.masked_fill_(x[:, 0] > 0, -float("inf"))
    return score.softmax(0)


def _clamped_rows(x, w):
    h = x @ w + x
    first = h[:2]
    with torch.no_grad():
        h[1:3].clamp_(-0.1, 0.1)
        h.add_(1)
    return h.square() * first.sum()


@pytest.mark.parametrize("forward", [_masked_score, _clamped_rows])
def test_gradients_pass_by_a_write_that_autograd_does_not_see(forward: Callable) -> None:
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    w = w[:, :1].detach().requires_grad_() if forward is _masked_score else w
    weights = torch.randn(8, 8) if forward is _clamped_rows else torch.randn(8)
    truth = forward(x, w)
    (found,), _ = run(traced(forward, x, w), {"x": x, "y": w})
    torch.testing.assert_close(found, truth)
    for mine, true in zip(*(torch.autograd.grad((one * weights).sum(), (x, w)) for one in (found, truth))):
        torch.testing.assert_close(mine, true)


def _tanh_scaled(x, y):
    h = torch.tanh(x)
    h.data.mul_(2)
    return h


def _multiplied_before(x, y):
    h = x + 1
    z = h.flatten() * y.flatten()
    h.data.mul_(2)
    return z + h.flatten()


@pytest.mark.parametrize(("forward", "name"), [(_tanh_scaled, "%tanh"), (_multiplied_before, "%mul")])
def test_a_write_that_autograd_does_not_see_into_what_it_keeps_is_refused(forward: Callable, name: str) -> None:
    x, y = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with pytest.raises(AutoparError, match=f"a tensor that {name} keeps for its backward is changed in place"):
        traced(forward, x, y)


def test_rows_that_a_lookup_scales_are_scaled_again_by_the_next() -> None:
    class Scaled(nn.Module):
        """An embedding of rows of a norm up to 1, which writes those that are longer, read twice."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, max_norm=1.0)

        def forward(self, ids):
            return (self.table(ids[0]) * self.table(ids[1])).sum(1)

    model, ids = Scaled(), torch.tensor([[0, 1, 2], [1, 3, 0]])
    weight = model.table.weight.detach().clone().requires_grad_()
    (found,), written = run(trace(model, (ids,), {}), {"table_weight": weight, "ids": ids})
    torch.testing.assert_close(found, model(ids))
    model(ids).sum().backward()
    torch.testing.assert_close(written["table.weight"], model.table.weight)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), weight)[0], model.table.weight.grad)
