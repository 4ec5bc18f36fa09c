"""Autocast in a model becomes casts of the graph: the graph computes what the model does, to the bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import TraceError
from autopar.ir.autocast import Autocast, Casts, casts_of
from autopar.ir.call_args import take_slots
from autopar.ir.graph import Value
from autopar.ir.run_graph import run
from autopar.ir.trace import trace
from tests.ir.compare import bindings

F32, BF16 = torch.float32, torch.bfloat16


class Regions(nn.Module):
    """Products, norms, losses and views; a region in a region; one weight used twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.first, self.norm = dtype, nn.Linear(8, 8), nn.LayerNorm(8)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", self.dtype):
            h = self.norm(self.first(x) + self.first(x.tanh()))
            h = F.scaled_dot_product_attention(h[None], h[None], h[None])[0]
            scores = torch.einsum("bij,bkj->bik", h, h)
            with torch.autocast("cpu", enabled=False):
                weights = scores.float().softmax(-1)
                plain = self.first(weights @ h.float())
            joined = torch.cat([h, plain], -1)[..., :8]
            made = self.conv(joined)
            return made, F.mse_loss(made, y), F.cross_entropy(made.flatten(1), y[:, 0, 0].long().clamp(0, 3)), weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_graph_of_autocast_regions_computes_what_the_model_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, args = Regions(dtype), (torch.randn(2, 4, 8), torch.randn(2, 4, 8))
    graph, expected = trace(model, args, {}), model(*args)
    found, _ = run(graph, bindings(graph, model, args, {}))
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    casts = [op for op in graph.ops if op.target == "aten.to.dtype" and op.inputs[0].name == "first_weight"]
    assert len(casts) == 1, "one cast serves both uses of a weight"


def casts(target: str, *args: object, on: str = "cpu") -> Casts:
    slotted, named, inputs = take_slots(args, {}, lambda leaf: isinstance(leaf, Value))
    return casts_of(target, slotted, named, inputs, Autocast(on, BF16))


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype = F32) -> Value:
    return Value(name, shape, dtype, False)


@pytest.mark.parametrize(
    ("on", "target", "args", "expected"),
    [
        ("cpu", "aten.linear.default", (value("x", (4, 8)), value("w", (8, 8))), Casts((BF16, BF16))),
        ("cuda", "aten.linear.default", (value("x", (4, 8)), value("w", (8, 8))), Casts((BF16, BF16))),
        ("cpu", "aten.softmax.int", (value("x", (4, 8), BF16), -1), Casts((BF16,))),
        ("cuda", "aten.pow.Tensor_Scalar", (value("x", (4, 8), BF16), 2), Casts((F32,))),
        ("cuda", "aten.sum.default", (value("x", (4, 8), BF16),), Casts((BF16,), F32)),
        ("cuda", "aten.to.dtype", (value("x", (4, 8), BF16), F32), Casts((BF16,))),
    ],
)
def test_casts_are_those_of_the_device(on: str, target: str, args: tuple, expected: Casts) -> None:
    assert casts(target, *args, on=on) == expected


def test_an_op_that_autocast_casts_within_is_refused() -> None:
    with pytest.raises(TraceError, match=r"casts inside; cast its inputs by hand"):
        casts("aten.cross_entropy_loss.default", value("x", (4, 8), BF16), value("t", (4,), torch.int64), on="cuda")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x @ x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return Doubled.apply(x)


def test_a_custom_function_within_autocast_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"test_autocast.py:\d+.*under autocast to torch.bfloat16, which cannot be seen"
    ):
        trace(Custom(), (torch.randn(4, 4, requires_grad=True),), {})


class Mixed(nn.Module):
    """Attention of queries in float32, as rotary embeddings give them, and values in a half; autocast casts both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return F.scaled_dot_product_attention(x, x, x.bfloat16())


def test_an_op_of_mixed_dtypes_that_runs_under_autocast_alone_is_cast() -> None:
    torch.manual_seed(0)
    args = (torch.randn(1, 2, 4, 8),)
    graph = trace(Mixed(), args, {})
    assert torch.equal(run(graph, bindings(graph, Mixed(), args, {}))[0][0], Mixed()(*args))
