"""Custom functions that split as the ops do that they run: numbers and gradients are the function's own."""

from typing import Any

import pytest
import torch

from autopar.errors import MicrobatchError
from autopar.ir.function_ops import TENSOR, Application, target_of
from autopar.ir.trace import trace
from autopar.sbp.microbatch.microbatch_graph import microbatched
from tests.float8 import ROWWISE, TENSORWISE, Float8Product, in_float8
from tests.sbp.exercise import exercise


def target(cls: type[torch.autograd.Function], num_tensors: int, *constants: Any) -> str:
    return target_of(Application(cls, (TENSOR,) * num_tensors + constants, num_tensors, 1, False))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


class Halved(torch.autograd.Function):
    """Its code does something else on parts: it divides by the number of elements that it sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.num = x.numel()
        return x * x / x.numel()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign() / ctx.num


class MaskedSoftmax(torch.autograd.Function):
    """That of DeBERTa: the number it fills in is a tensor made inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = torch.softmax(x.masked_fill(mask, torch.tensor(torch.finfo(x.dtype).min)), -1).masked_fill_(mask, 0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (out,) = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, out, -1, out.dtype), None


def test_a_function_makes_a_tensor_of_a_number() -> None:
    mask = torch.rand(4, 6, 5) < 0.3
    found = exercise(target(MaskedSoftmax, 2), draw(4, 6, 5, dtype=torch.float64), mask)
    assert {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)"} <= set(found)


@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE])
def test_products_in_float8_split_as_others(scaling: str) -> None:
    torch.manual_seed(0)
    found = exercise(target(Float8Product, 2, scaling), draw(4, 16, 64), draw(32, 64))
    placements = {text.split(" [")[0] for text in found}
    assert placements == {"B B -> B", "S(0) B* -> S(0)", "B* S(0) -> S(2)", "S(2) S(1) -> P"}


def test_a_function_that_counts_its_elements_is_run_as_its_ops() -> None:
    assert "S(1) -> S(1) [split_1]" in exercise(target(Halved, 1), draw(4, 6, dtype=torch.float64))


def test_scales_of_a_whole_batch_are_refused_on_microbatches() -> None:
    model, x = in_float8(torch.nn.Sequential(torch.nn.Linear(32, 32)), ROWWISE), torch.randn(32, 32)
    with pytest.raises(
        MicrobatchError, match=r"Float8Product.* it reduces over the whole batch within, as its ops show"
    ):
        microbatched(trace(model, (x,), {}), 2)
