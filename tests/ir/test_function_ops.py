"""Custom autograd functions as ops: one op for equal calls, and refusals that name the function."""

import pickle

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel.function_flops import function_flops
from autopar.ir.function_ops import target_of
from autopar.ir.graph import Graph
from autopar.ir.run_graph import run
from autopar.ir.trace import trace
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.placement import I, R, S
from autopar.sbp.rules.given import forget_signatures
from tests.ir.compare import assert_same_as_model


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * ctx.scale * grad, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@torch.jit.script
def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


class Gelu(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(super().forward(x))


def test_a_scripted_function_that_torch_has_optimized_has_its_gradient() -> None:
    model, x = Gelu(4, 4), torch.randn(2, 4)
    for _ in range(3):
        model(x).sum().backward()
    assert_same_as_model(trace(model, (x,), {}), model, (x,), {}, tolerance=1e-6)


def traced(forward, x: torch.Tensor) -> Graph:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

    return trace(Model(), (x,), {})


X = torch.arange(6.0).reshape(2, 3).requires_grad_()


def test_calls_with_the_same_constants_are_one_op_and_others_are_not() -> None:
    calls = ((2.0, 2), (2.0, 2), (2, 2), (3.0, 2))
    graph = traced(lambda x: sum(Scaled.apply(x, scale) for scale, _ in calls), X)
    targets = [op.target for op in graph.ops if "Scaled" in op.target]
    assert len(targets) == 4, "calls of equal functions on one tensor are not merged: their backwards may differ"
    assert targets[0] == targets[1] and len(set(targets)) == 3


def test_the_graph_runs_the_own_backward() -> None:
    graph = traced(lambda x: Scaled.apply(x, 2.0).sum(), X)
    (loss,), _ = run(graph, {"x": X})
    (gradient,) = torch.autograd.grad(loss, X)
    assert torch.equal(gradient, 2 * X)


def test_a_pending_sum_meets_a_backward_that_is_known_to_be_linear() -> None:
    (op,) = traced(lambda x: Scaled.apply(x, 2.0), X).ops
    assert [found.outputs for found in signatures_of(op)] == [(I,), (S(0),), (S(1),), (R,)]  # its ops tell
    autopar.splits("batch")(Scaled)
    try:
        forget_signatures()
        assert [found.outputs for found in signatures_of(op)] == [(I,), (S(0),)]
    finally:
        del Scaled.autopar_rule
        forget_signatures()


def test_a_pickled_op_takes_its_class_along() -> None:
    """Processes that plan other points of a sweep, or ahead of a restart, have not traced the model."""
    (op,) = (op for op in traced(lambda x: Scaled.apply(x, 2.0), X).ops if "Scaled" in op.target)
    how, (application,) = op.target.__reduce__()
    assert how is target_of and application.cls is Scaled and pickle.loads(pickle.dumps(op)) == op


class Filled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.maximum(x, torch.tensor(0.25, dtype=x.dtype)) * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x > 0.25) * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)


def test_tensors_that_a_function_makes_of_numbers_are_its_own() -> None:
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda _module, _args, output: Filled.apply(output))
    assert_same_as_model(trace(model, (X,), {}), model, (X,), {})


def test_flops_are_counted() -> None:
    weight = torch.ones(3, 5)
    (op,) = (op for op in traced(lambda x: Product.apply(x, weight), X).ops if "Product" in op.target)
    assert function_flops(op, ((2, 3), (3, 5))) == (2 * 2 * 3 * 5, 2 * 2 * 2 * 3 * 5)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x: Scaled.apply(x, nn.Linear(1, 1)), r"test_function_ops.py:.*Scaled.apply is called with a Linear"),
        (lambda x: Written.apply(x.clone()), r"test_function_ops.py:.*Written.forward writes to a tensor"),
    ],
    ids=["module", "dirty"],
)
def test_what_cannot_be_kept_is_refused_by_name(forward, words: str) -> None:
    with pytest.raises(autopar.AutoparError, match=words):
        traced(forward, X)


def test_what_may_not_be_decorated() -> None:
    with pytest.raises(autopar.AutoparError, match="'elementwise' or 'batch' or a rule, found 'rows'"):
        autopar.splits("rows")
    with pytest.raises(autopar.AutoparError, match="decorates a torch"):
        autopar.splits("batch")(nn.Linear)
