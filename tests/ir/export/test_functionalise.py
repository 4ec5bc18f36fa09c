"""In-place programs give the same results once they are functional."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.print_graph import format_graph
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model


class InPlace(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(2, 4))
        self.register_buffer("count", torch.tensor(0))
        self.function = function

    def forward(self, x):
        return self.function(self, self.linear(x))


def _slice_then_base(model, x):
    x = x * 1
    x[:, 1:3] += 1
    x[0] = 5
    return x * 2


def _base_then_view(model, x):
    x = x * 1
    part = x[:, 2:]
    x.mul_(3)
    return part + 1


def _view_then_view(model, x):
    x = x.detach() * 1  # autograd refuses writes through one of several views
    turned = x.t().reshape(4, 2, 1)
    rows = x.unbind(0)
    left, right = x.chunk(2, dim=1)
    turned.squeeze(-1).transpose(0, 1).add_(x.detach())
    left.mul_(right)
    return turned.sum(-1), rows[0] * rows[1], left


def _reshape_of_view(model, x):
    x = x * 1
    x.view(2, 2, 2)[:, 0].copy_(torch.ones(2))
    x.flatten()[3:5].fill_(7)
    return x


def _masks(model, x):
    x = x * 1
    x.masked_fill_(x > 0, 0.5)
    x[:, 0].zero_()
    x.index_put_((torch.tensor([0, 1]), torch.tensor([1, 2])), torch.tensor(9.0))
    return x.clamp_(-1, 8)


def _unary(model, x):
    y = F.relu(x * 1, inplace=True) * 2
    y = F.dropout(y.sigmoid_() + 1, 0.0, True, inplace=True)
    return y.unsqueeze_(0)


def _mixed_dtype(model, x):
    half = x.half()
    half.add_(x)
    return half


def _buffers(model, x):
    model.count += 1
    model.state[0].add_(x.detach().sum(0))
    seen = model.state * 2
    with torch.no_grad():
        model.state.mul_(0.5).copy_(model.state + 1)
    return x + seen + model.count


def _reassigned(model, x):
    model.state = model.state + x.detach()
    return x + model.state


def _empty(model, x):
    result = torch.empty(3, 4)
    result[0] = 1
    result[1:] = x
    return result


PROGRAMS = [
    _slice_then_base,
    _base_then_view,
    _view_then_view,
    _reshape_of_view,
    _masks,
    _unary,
    _mixed_dtype,
    _buffers,
    _reassigned,
    _empty,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_same_results(program):
    torch.manual_seed(0)
    model, x = InPlace(program), torch.randn(2, 4)
    graph = trace(model, (x,), {})
    assert_same_as_model(graph, model, (x,), {}, tolerance=1e-6)
    assert not any("_." in op.target for op in graph.ops), format_graph(graph)


def test_no_mutation_is_forgotten():
    graph = trace(InPlace(_buffers), (torch.randn(2, 4),), {})
    assert [fqn for fqn, _ in graph.mutations] == ["state", "count"]


def test_random_in_place():
    model, x = InPlace(lambda model, x: x * torch.empty(4).uniform_(1, 2) + torch.empty(4).normal_()), torch.randn(2, 4)
    graph = trace(model, (x,), {})
    assert_same_as_model(graph, model, (x,), {}, tolerance=1e-6)
    assert len(graph.constant_ops) <= 2, "random numbers are no constants"
