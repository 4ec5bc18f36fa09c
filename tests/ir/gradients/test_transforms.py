"""Transforms of `torch.func` in a forward, beside torch's own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ir.gradients.test_gradients import assert_as_on_one_device

Function = Callable[[Tensor, Tensor], Tensor]


def of_a_function(x: Tensor, w: Tensor) -> Tensor:
    """What the function reads besides is held, though it is the same tensor."""
    h = (x @ w).tanh()
    slope, value = torch.func.grad_and_value(lambda y: (y * h).square().sum() + (y @ w).sin().sum())(h)
    return (slope * h).square().mean() + value


def of_arguments(x: Tensor, w: Tensor) -> Tensor:
    both = torch.func.grad(lambda a, b, scale: ((a @ b).tanh() * scale).sum(), argnums=(0, -2))(x, w, 2.0)
    (first, aux) = torch.func.grad(lambda y: ((y @ w).exp().sum(), y.mean()), has_aux=True)(x)
    return both[0].square().sum() + both[1].tanh().sum() + first.mean() * aux


def of_weights(x: Tensor, w: Tensor) -> Tensor:
    """A step of an inner loop on a module's own parameters."""
    layer = nn.Linear(6, 6, bias=False, dtype=x.dtype)
    weights = {"weight": w * 2}
    for _ in range(2):
        slopes = torch.func.grad(lambda p: F.mse_loss(torch.func.functional_call(layer, p, (x,)), x))(weights)
        weights = {name: each - 0.1 * slopes[name] for name, each in weights.items()}
    return F.mse_loss(torch.func.functional_call(layer, weights, (x,)), x)


def along(x: Tensor, w: Tensor) -> Tensor:
    """The derivative along a flow, of a net with a norm (not layer_norm: torch's own is wrong) and attention."""

    def net(y: Tensor, t: Tensor) -> Tensor:
        h = F.rms_norm(F.silu(y @ w + t), (6,))
        return h + F.scaled_dot_product_attention(h[None], h[None], h[None] * t)[0]

    t = torch.linspace(0, 1, 4, dtype=x.dtype)[:, None]
    value, rate = torch.func.jvp(net, (x, t), (x.flip(0), torch.ones_like(t)))
    return (value - (1 - t) * rate).square().mean() + (value - rate.detach()).abs().mean()


def of_several(x: Tensor, w: Tensor) -> Tensor:
    (one, two), rates, aux = torch.func.jvp(
        lambda p: ((p["a"] @ w, p["b"].sin()), p["a"].sum()), ({"a": x, "b": x},), ({"a": x, "b": w[:4]},), has_aux=True
    )
    return (one * rates[0]).sum() + (two * rates[1]).sum() + aux


def back(x: Tensor, w: Tensor) -> Tensor:
    value, transposed = torch.func.vjp(lambda a, b: (a @ b).tanh(), x, w)
    first, second = transposed(value * 2)
    return first.square().sum() + second.sum() + transposed(torch.ones_like(value))[0].mean()


def without_graph(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        value, rate = torch.func.jvp(lambda y: (y @ w).tanh(), (x,), (x,))
        slope = torch.func.grad(lambda y: (y @ w).sin().sum())(x)
    return ((x @ w) * (value + rate + slope)).mean()


@pytest.mark.parametrize(
    "function",
    [of_a_function, of_arguments, of_weights, along, of_several, back, without_graph],
    ids=lambda f: f.__name__,
)
def test_numbers_and_gradients_are_those_of_one_device(function: Function) -> None:
    assert_as_on_one_device(function)
