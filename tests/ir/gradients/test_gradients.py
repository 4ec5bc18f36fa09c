"""A gradient that a forward takes, and its derivatives, are those of one device."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from autopar.errors import TraceError
from autopar.ir.run_graph import run
from autopar.ir.trace import trace

Function = Callable[[Tensor, Tensor], Tensor]


def total(*terms: Tensor) -> Tensor:
    return sum(terms[1:], terms[0])


# Of x [4, 6] and w [6, 6]: what is differentiated with respect to x.
DIFFERENTIATED: dict[str, Function] = {
    "products": lambda x, w: total(
        torch.einsum("ni,ij,nj->n", x, w, x), torch.bmm((x @ w).unsqueeze(1), x.unsqueeze(2)).sum()
    ),
    "linear": lambda x, w: F.linear(F.bilinear(x, x, w.expand(2, 6, 6)), w[:3, :2], w[0, :3]).tanh(),
    "activations": lambda x, w: sum(
        f(x @ w)
        for f in (F.gelu, F.silu, F.mish, F.elu, F.softplus, F.hardswish, F.leaky_relu, F.logsigmoid, F.selu, F.celu)
    ),
    "gates": lambda x, w: F.glu(x @ w) * F.prelu(x, w[0, :1])[:, :3] * F.hardtanh(x[:, :3]) * F.softshrink(x[:, 3:]),
    "softmaxes": lambda x, w: total((x @ w).softmax(1) * (x @ w).log_softmax(1), torch.logsumexp(x, 1, keepdim=True)),
    "losses": lambda x, w: total(
        F.cross_entropy(x @ w, torch.arange(4), label_smoothing=0.1),
        F.smooth_l1_loss(x, x @ w),
        F.mse_loss(x, x @ w),
        F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(w[:4])),
        F.kl_div(x, w[:4]),
        F.huber_loss(x, w[:4]),
        F.cosine_similarity(x, x @ w).mean(),
    ),
    "layer norm": lambda x, w: F.layer_norm(x @ w, [6], w[0], w[1]) * F.rms_norm(x, [6], w[2]),
    "group norm": lambda x, w: (
        F.group_norm(x.unsqueeze(-1) * w[0], 3, w[1], w[2]) * F.instance_norm(x.unsqueeze(-1) * w[3])
    ),
    "batch norm": lambda x, w: total(
        F.batch_norm(x @ w, None, None, w[0], w[1], training=True),
        F.batch_norm(x, w[0].detach(), w[1].detach() ** 2, w[2], w[3]),
    ),
    "convolution": lambda x, w: F.conv1d(x.view(2, 2, 6), w.view(6, 2, 3), w[0], stride=2, padding=2, dilation=2),
    "grouped convolution": lambda x, w: F.conv2d(
        x.view(1, 4, 2, 3), w.view(-1)[:32].view(8, 2, 2, 1), groups=2, padding=1
    ),
    "transposed convolution": lambda x, w: F.conv_transpose1d(x.view(2, 2, 6), w.view(2, 6, 3), None, 2, 1, 1),
    "grouped transposed": lambda x, w: F.conv_transpose2d(x.view(1, 4, 2, 3), w[:4].view(4, 3, 2, 1), None, 2, 0, 1, 2),
    "pools": lambda x, w: total(F.max_pool1d(x @ w, 2), F.avg_pool1d(x, 2), F.adaptive_avg_pool1d(x @ w, 3)),
    "pads": lambda x, w: total(
        F.pad((x @ w).unsqueeze(0), (1, 1), "reflect"), F.pad(x.unsqueeze(0), (1, 1), "replicate")
    ),
    "indices": lambda x, w: total(
        (x @ w)[:, [0, 2, 2]] * x.gather(1, torch.tensor([[0, 1, 1]] * 4)), x[1:3, ::2].repeat(2, 1)
    ),
    "scattered": lambda x, w: x.scatter_add(1, torch.tensor([[0, 1, 1]] * 4), (x @ w)[:, :3]).index_add(
        0, torch.tensor([1]), w[:1] * x[:1]
    ),
    "views": lambda x, w: (
        torch.cat([x.T.reshape(4, 6), x.unfold(1, 3, 3).flatten(1), x.roll(1, 0).flip(1)], 1).tril()
        * (x @ w).repeat(1, 3)
    ),
    "reductions": lambda x, w: total(
        x.std(1), x.norm(dim=1), (x @ w).amax(1), x.prod(1), x.var(1), x.max(1)[0], (x @ w).sort(1)[0][:, 0]
    ),
    "cumulative": lambda x, w: total((x @ w).cumsum(1), x.cumprod(1), torch.logcumsumexp(x, 1), x.cummax(1)[0]),
    "linear algebra": lambda x, w: total(
        torch.linalg.solve(w + 6 * torch.eye(6), x.T).T,
        torch.linalg.inv(x @ x.T + torch.eye(4)).sum(),
        torch.logdet(x @ x.T + torch.eye(4)),
    ),
    "distances": lambda x, w: F.pairwise_distance(x, x @ w),
    "powers": lambda x, w: total(
        torch.atan2(x, x @ w),
        x.abs() ** 1.5,
        torch.exp(x).log1p(),
        torch.where(x > 0, x, x * x @ w),
        x.sin() * x.erf(),
        x.clamp(-1, 1) * torch.maximum(x, x @ w),
    ),
    "written in place": lambda x, w: _written(x @ w) * x,
    "fourier": lambda x, w: (torch.fft.rfft(x @ w).abs() ** 2)[:, :3],
}


def _written(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:4] = x[:, :3] ** 2
    y[0] += x[0]
    return y.mul_(x)


def taken_again(x: Tensor, w: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = torch.tanh(x @ w)
    (first,) = grad(y.sum(), x, create_graph=True)
    (second,) = grad(first[:, 0].sum(), [x], create_graph=True)
    return (second * first).square().mean() + grad(second.square().sum(), x, create_graph=True)[0].mean()


def cut_off(x: Tensor, w: Tensor) -> Tensor:
    """What comes before `requires_grad_`, is detached, or computed without a graph, has no part in it."""
    x = x.clone()
    before = (x @ w).sin()
    inner = x.detach()
    inner.requires_grad = True
    with torch.no_grad():
        constant = inner * 3
    y = (inner**3 * before).sum() + (inner.detach() ** 2 * inner).sum() + (constant * inner).sum() + (x**4).sum()
    x.requires_grad_()
    return grad(y, inner, create_graph=True)[0].square().mean() + y


def without_graph(x: Tensor, w: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (step,) = grad((y @ w).square().sum(), y)
    return ((x - 0.1 * step) @ w).square().mean()


def of_parameters(x: Tensor, w: Tensor) -> Tensor:
    (step,) = grad((x @ w).square().mean(), w, create_graph=True)
    return (x @ (w - 0.1 * step)).square().mean()


def of_what_is_between(x: Tensor, w: Tensor) -> Tensor:
    h = torch.relu(x @ w)
    y = h.mean(1)
    a, b = grad([y, y.square().sum()], (h, w), [torch.linspace(0, 1, 4).to(y), None], create_graph=True)
    return (a * h).sum() + b.square().mean()


def unused(x: Tensor, w: Tensor) -> Tensor:
    x, z = x.clone().requires_grad_(), x.clone().requires_grad_()
    first, none = grad((x @ w).square().sum(), (x, z), create_graph=True, allow_unused=True)
    _, zeros = grad((x @ w).square().sum(), (x, z), create_graph=True, materialize_grads=True)
    assert none is None
    return (first + zeros).square().mean()


WAYS: dict[str, Function] = {
    each.__name__: each for each in (taken_again, cut_off, without_graph, of_parameters, of_what_is_between, unused)
}


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def penalised(function: Function) -> Function:
    def of(x: Tensor, w: Tensor) -> Tensor:
        y = function(x, w)
        weights = torch.linspace(0.5, 1.5, y.numel()).to(x).view(y.shape)
        (gradient,) = grad(y, x, weights, create_graph=True)
        return (gradient * x.detach().cos()).square().sum()

    return lambda x, w: of(x.clone().requires_grad_(), w)


def assert_as_on_one_device(function: Function) -> None:
    given, other = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Model(function)
    graph = trace(model, (given,), {})
    for x in (given, other):
        truth = model(x)
        of_w = grad(truth, model.w)[0] if truth.requires_grad else None
        values = {"parameter": model.w, "argument": x}
        found = run(graph, {item.value.name: values[item.kind] for item in graph.inputs if item.kind in values})[0][0]
        torch.testing.assert_close(found, truth)
        if of_w is not None:
            torch.testing.assert_close(grad(found, model.w)[0], of_w)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_and_their_derivatives(name: str) -> None:
    assert_as_on_one_device(penalised(DIFFERENTIATED[name]))


@pytest.mark.parametrize("name", WAYS)
def test_ways_to_take_them(name: str) -> None:
    assert_as_on_one_device(WAYS[name])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 3


REFUSED: dict[str, Function] = {
    r"draws random numbers.*p=0": penalised(lambda x, w: F.dropout(x @ w, 0.5)),
    r"autograd_function.Doubled.default .*write it in torch's ops": penalised(lambda x, w: Doubled.apply(x @ w)),
    r"is_grads_batched=True\) is not recorded": lambda x, w: grad(x @ w, w, torch.ones(2, 4, 6), is_grads_batched=True)[
        0
    ],
    r"appears to not have been used": lambda x, w: grad((x * x).sum(), x.clone().requires_grad_())[0],
    r"Tensor.backward in forward is not recorded: take": lambda x, w: (x @ w).sum().backward() or x,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(TraceError, match=rf"test_gradients.py:\d+.*{message}"):
        trace(Model(REFUSED[message]), (torch.randn(4, 6, dtype=torch.float64, requires_grad=True),), {})
