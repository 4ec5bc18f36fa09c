"""`plain_result` gives what the op itself gives on the meta device, or leaves the call to it."""

from typing import Any

import pytest
import torch

from autopar.ir.sizes.plain_results import plain_result

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)


X, W, B = meta(8, 5, 6), meta(7, 6, trained=True), meta(7, trained=True)
TOKENS, MASK = meta(8, dtype=torch.int64), meta(2, 1, 5, 7, dtype=torch.bool)
ONE = meta(1, 5, 1)
HEADS = meta(2, 5, 4, 6, trained=True).transpose(1, 2)
KEYS, VALUES = meta(2, 4, 7, 6), meta(2, 7, 4, 3).transpose(1, 2)
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
    *((op, (ONE,)) for op in (aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default)),
    *((op, (x, number)) for op in (aten.add.Tensor, aten.sub.Tensor) for x in (X, ONE) for number in (2, 0.5)),
    *((op, (W, number)) for op in (aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar) for number in (3, 0.5)),
    *((op, (ONE, ONE)) for op in (aten.add.Tensor, aten.mul.Tensor)),
    *((aten.softmax.int, (ONE, dim)) for dim in (0, 1)),
    (aten.layer_norm.default, (meta(1, 1, 6), [6], meta(6, trained=True), meta(6), 1e-5)),
    (aten.layer_norm.default, (ONE, [5, 1])),
    (aten.linear.default, (meta(1, 1, 6), W, B)),
    (aten.linear.default, (meta(1, 5, 6), meta(1, 6), meta(1))),
    (aten.addmm.default, (B, meta(5, 6), meta(6, 7))),
    (aten.addmm.default, (meta(7), meta(1, 6), meta(6, 7, trained=True))),
    *((aten.cat.default, ([X, meta(8, 5, 6, trained=True), X], dim)) for dim in (0, 1, -1)),
    (aten.cat.default, ([meta(1, 4, 5, 2), meta(1, 4, 1, 2)], 2)),
    (aten.cat.default, ([ONE],)),
    (aten.scaled_dot_product_attention.default, (HEADS, KEYS, VALUES)),
    (aten.scaled_dot_product_attention.default, (HEADS, KEYS, VALUES, MASK)),
    (aten.scaled_dot_product_attention.default, (meta(2, 4, 1, 6), KEYS, VALUES, None, 0.0, True)),
    (
        aten.scaled_dot_product_attention.default,
        (meta(1, 4, 1, 6), meta(1, 4, 7, 6), meta(1, 4, 7, 3), MASK[:1, :, :1]),
    ),
]
LEFT = [  # to torch: errors, promotion, broadcast, other orders of dims
    (aten.add.Tensor, (X, meta(6))),
    (aten.add.Tensor, (X, X.double())),
    (aten.add.Tensor, (X.transpose(0, 1), X.transpose(0, 1))),
    (aten.add.Tensor, (X, 2j)),
    (aten.add.Tensor, (TOKENS, 2)),
    (aten.pow.Tensor_Scalar, (X, 2j)),
    (aten.relu.default, (TOKENS,)),
    (aten.relu.default, (meta(5, 1, 3).transpose(0, 1),)),
    (aten.addmm.default, (B, meta(5, 5), meta(6, 7))),
    (aten.addmm.default, (meta(5, 7), meta(5, 6), meta(6, 7))),
    (aten.addmm.default, (B, meta(5, 6), meta(7, 6).T)),
    (aten.cat.default, ([X, meta(8, 5, 5)], 1)),
    (aten.cat.default, ([X, meta(8, 5)], 1)),
    (aten.cat.default, ([X, X.double()], 1)),
    (aten.cat.default, ([TOKENS, TOKENS],)),
    (aten.cat.default, ([X, X], 3)),
    (aten.cat.default, ([X.transpose(0, 1), X.transpose(0, 1)], 1)),
    (aten.scaled_dot_product_attention.default, (HEADS, KEYS, KEYS[:, :, 1:])),
    (aten.scaled_dot_product_attention.default, (HEADS, KEYS, VALUES.double())),
    (aten.scaled_dot_product_attention.default, (HEADS, KEYS, VALUES, MASK[..., 1:])),
    (aten.scaled_dot_product_attention.default, (HEADS, KEYS, VALUES, MASK.float())),
    (aten.scaled_dot_product_attention.default, (HEADS, KEYS, VALUES, MASK, 0.0, True)),
    (aten.scaled_dot_product_attention.default, (HEADS, KEYS, VALUES, None, 0.5)),
    (aten.scaled_dot_product_attention.default, (HEADS[0], KEYS[0], VALUES[0])),
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
