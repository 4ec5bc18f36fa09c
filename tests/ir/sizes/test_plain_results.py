"""`plain_result` gives what the op itself gives on the meta device, or leaves the call to it."""

from typing import Any

import pytest
import torch

from autopar.ir.sizes.plain_results import plain_result

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)


X, W, B = meta(8, 5, 6), meta(7, 6, trained=True), meta(7, trained=True)
TOKENS = meta(8, dtype=torch.int64)
KNOWN: list[tuple[Any, tuple[Any, ...]]] = [
    *((op, (X,)) for op in (aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default)),
    (aten.sigmoid.default, (meta(4, 3, trained=True),)),
    *((op, (X, meta(8, 5, 6, trained=True))) for op in (aten.add.Tensor, aten.sub.Tensor)),
    *((op, (X, X)) for op in (aten.mul.Tensor, aten.div.Tensor)),
    *((op, (X, dim)) for op in (aten.softmax.int, aten.log_softmax.int) for dim in (0, 1, -1)),
    (aten.layer_norm.default, (X, [6], meta(6, trained=True), meta(6), 1e-5)),
    (aten.layer_norm.default, (X, [5, 6])),
    (aten.layer_norm.default, (X, [6], None, None, 1e-5)),
    (aten.linear.default, (X, W, B)),
    (aten.linear.default, (X, W)),
    (aten.linear.default, (meta(3, 6, dtype=torch.float64), meta(2, 6, dtype=torch.float64))),
    (aten.cross_entropy_loss.default, (meta(8, 10, trained=True), TOKENS)),
    (aten.cross_entropy_loss.default, (meta(8, 10), TOKENS, None, 2, -100, 0.1)),
]
LEFT = [  # to torch: errors, promotion, broadcast, other orders of dims
    (aten.add.Tensor, (X, meta(6))),
    (aten.add.Tensor, (X, X.double())),
    (aten.add.Tensor, (X.transpose(0, 1), X.transpose(0, 1))),
    (aten.add.Tensor, (X, 2)),
    (aten.relu.default, (TOKENS,)),
    (aten.relu.default, (meta(1, 3),)),
    (aten.softmax.int, (X, 3)),
    (aten.softmax.int, (X, -1, torch.float64)),
    (aten.layer_norm.default, (X, [5])),
    (aten.layer_norm.default, (X, [6], meta(5))),
    (aten.layer_norm.default, (X, [6], meta(6, dtype=torch.float64))),
    (aten.linear.default, (X, meta(7, 5))),
    (aten.linear.default, (X, W, meta(6))),
    (aten.linear.default, (meta(6), W)),
    (aten.cross_entropy_loss.default, (meta(8, 10), TOKENS, None, 0)),
    (aten.cross_entropy_loss.default, (meta(8, 10), meta(8, 10))),
    (aten.cross_entropy_loss.default, (meta(8, 10), meta(7, dtype=torch.int64))),
    (aten.cross_entropy_loss.default, (meta(8, 10), TOKENS, meta(10))),
    (aten.exp.default, (X,)),
]


def described(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.requires_grad and x.is_leaf


@pytest.mark.parametrize("is_grad_on", [True, False])
@pytest.mark.parametrize(("op", "args"), KNOWN)
def test_is_what_the_op_gives(op: Any, args: tuple[Any, ...], is_grad_on: bool) -> None:
    with torch.set_grad_enabled(is_grad_on):
        result = plain_result(op, args, {})
        assert result is not None
        assert described(result) == described(op(*args))


@pytest.mark.parametrize(("op", "args"), LEFT)
def test_leaves_the_call_to_torch(op: Any, args: tuple[Any, ...]) -> None:
    assert plain_result(op, args, {}) is None


def test_keywords_are_left_to_torch() -> None:
    assert plain_result(aten.add.Tensor, (X, X), {"alpha": 2}) is None
    assert plain_result(aten.gelu.default, (X,), {"approximate": "tanh"}) is None
