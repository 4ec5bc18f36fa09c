"""In-place programs give the same results once they are functional."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import TraceError
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


def _through_views_of_all_kinds(model, x):
    x = x.detach() * 1
    rows, columns = x.vsplit(2)[1], x.hsplit(2)[1]
    x.mT[1].add_(1)
    x.T.mul_(torch.arange(2.0))
    x.movedim(0, 1)[0].sub_(2)
    x.narrow(1, -2, 2).neg_()
    x.diagonal().fill_(3)
    x.tensor_split(3, 1)[0].mul_(2)
    return rows * 1, columns * 1, x.unsafe_chunk(2)[1]


def _dropout_that_drops_nothing(model, x):
    x = x * 1
    kept, same = F.dropout(x, 0.5, False), F.alpha_dropout(x, 0.0, True)
    x.mul_(3)
    same[0].add_(1)
    return x + 1, kept * 2


def _diagonals(model, x):
    x = x * 1
    tall = x.T * 1
    x.fill_diagonal_(3)
    return x, tall[1:].fill_diagonal_(-1.5), tall


PROGRAMS = [
    _diagonals,
    _through_views_of_all_kinds,
    _dropout_that_drops_nothing,
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


def _view_by_an_op_of_several_tensors(model, x):
    seen = torch.broadcast_tensors(model.state, x)[0]
    model.state.add_(1)
    return seen + x


def _view_by_einsum(model, x):
    seen = torch.einsum("ij->ji", model.state)
    model.state.add_(1)
    return seen.t() + x


def _turned_buffer(model, x):
    return x + model.state.t_().t()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (_view_by_an_op_of_several_tensors, "aten.broadcast_tensors.default gave a view of"),
        (_view_by_einsum, "aten.einsum.default gave a view of"),
        (_turned_buffer, "changes the shape of buffer state"),
    ],
)
def test_a_write_that_a_view_would_not_see_is_refused(program, words):
    with pytest.raises(TraceError, match=words):
        trace(InPlace(program), (torch.randn(2, 4),), {})


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_running_means_of_batch_norms(momentum):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)), torch.randn(8, 4)
    model(torch.randn(8, 4))
    assert_same_as_model(trace(model, (x,), {}), model, (x,), {}, tolerance=1e-6)


def test_no_mutation_is_forgotten():
    graph = trace(InPlace(_buffers), (torch.randn(2, 4),), {})
    assert [fqn for fqn, _ in graph.mutations] == ["state", "count"]


def test_random_in_place():
    model, x = InPlace(lambda model, x: x * torch.empty(4).uniform_(1, 2) + torch.empty(4).normal_()), torch.randn(2, 4)
    graph = trace(model, (x,), {})
    assert_same_as_model(graph, model, (x,), {}, tolerance=1e-6)
    assert len(graph.constant_ops) <= 2, "random numbers are no constants"
