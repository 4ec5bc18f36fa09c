"""Attention on shards against the op itself."""

from typing import Any

import pytest
import torch

from autopar.sbp.candidates import strategies_of
from autopar.sbp.local_ops.sequence import attention_blocks
from autopar.sbp.op_signatures import signatures_of
from tests.sbp.exercise import check, exercise, exercise_mesh, f64
from tests.sbp.rulecheck import make_op

OP = "aten.scaled_dot_product_attention.default"
QKV = f64(2, 4, 6, 8), f64(2, 4, 10, 8), f64(2, 4, 10, 12)


def test_batch_heads_queries_and_features():
    assert exercise(OP, *QKV) == {
        "B B B -> B",
        "B* B* B* -> B*",
        "S(0) S(0) S(0) -> S(0)",
        "S(1) S(1) S(1) -> S(1)",
        "S(2) B* B* -> S(2)",
        "S(2) S(2) S(2) -> S(2) [ring]",
        "B* B* S(3) -> S(3)",
        "B* B* P -> P",
    }


def test_mask_is_split_where_it_is_not_broadcast():
    found = exercise(OP, *QKV, f64(2, 1, 6, 10))
    assert {"S(0) S(0) S(0) S(0) -> S(0)", "S(1) S(1) S(1) B* -> S(1)", "S(2) B* B* S(2) -> S(2)"} < found
    found = exercise(OP, *QKV, torch.rand(6, 10) > 0.3)
    assert {"S(0) S(0) S(0) B -> S(0)", "S(2) B* B* S(0) -> S(2)"} < found
    assert "S(2) B* B* B -> S(2)" in exercise(OP, *QKV, torch.rand(1, 10) > 0.3)


def test_grouped_heads_split_together():
    found = exercise(OP, f64(2, 8, 6, 4), f64(2, 2, 6, 4), f64(2, 2, 6, 4), enable_gqa=True)
    assert "S(1) S(1) S(1) -> S(1)" in found


def test_the_only_key_head_is_used_by_all():
    found = exercise(OP, f64(2, 8, 6, 4), f64(2, 1, 6, 4), f64(2, 1, 6, 4), enable_gqa=True)
    assert "S(1) B* B* -> S(1)" in found


def test_three_dims_and_a_batch_that_is_broadcast():
    assert "S(0) S(0) S(0) -> S(0)" in exercise(OP, f64(4, 6, 8), f64(4, 6, 8), f64(4, 6, 8))
    assert "S(0) B* B* -> S(0)" in exercise(OP, f64(2, 4, 6, 8), f64(1, 4, 6, 8), f64(1, 4, 6, 8))


def test_causal_queries_know_where_they_begin():
    for num_keys in (4, 6, 8):
        found = exercise(
            OP, f64(2, 2, 6, 4), f64(2, 2, num_keys, 4), f64(2, 2, num_keys, 4), None, 0.0, True, num_ranks=2
        )
        assert "S(2) B* B* -> S(2) [queries]" in found


CAUSAL = f64(2, 4, 8, 4), f64(2, 4, 8, 4), f64(2, 4, 8, 4), None, 0.0, True


@pytest.mark.parametrize("role", ["queries", "ring"])
def test_causal_parts_of_the_sequence_lie_along_one_axis_beside_heads(role: str) -> None:
    assert exercise_mesh(OP, *CAUSAL, scale=0.3, roles=("queries", role)) == 0
    assert exercise_mesh(OP, *CAUSAL, roles=("split", role)) == 3
    assert exercise_mesh(OP, *CAUSAL, roles=(role, "split")) == 3


@pytest.mark.parametrize("role", ["queries", "ring", "split"])
def test_key_heads_beside_parts_of_the_sequence(role: str) -> None:
    args = f64(2, 8, 8, 4), f64(2, 4, 8, 4), f64(2, 4, 8, 4), None, 0.0, True
    for roles in ((role, "key_heads"), ("key_heads", role)):
        found = exercise_mesh(OP, *args, roles=roles, mesh_shape=(2, 2), enable_gqa=True)
        # heads are split once: samples and features are left; heads read by some ranks only go around no ring
        assert found == {"split": 2, "queries": 1, "ring": 0}[role]


def _roles_checked(num_ranks: int, *args: Any, **kwargs: Any) -> set[str]:
    """The roles of the call whose parts divide over one axis, all checked."""
    op, inputs = make_op(OP, *args, **kwargs)
    found = [strategy for strategy in strategies_of(op, (num_ranks,)) if strategy.signatures[0].role]
    for strategy in found:
        check(op, strategy, (num_ranks,), inputs)
    return {strategy.signatures[0].role for strategy in found}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(24, 24), (12, 12), (12, 24), (24, 12)])
def test_causal_parts_with_grouped_heads_on_any_number_of_ranks(
    num_ranks: int, num_queries: int, num_keys: int
) -> None:
    keys = f64(2, 2, num_keys, 4), f64(2, 2, num_keys, 4)
    found = _roles_checked(num_ranks, f64(2, 12, num_queries, 4), *keys, None, 0.0, True, enable_gqa=True)
    assert found == {"queries", "ring", "key_heads"}


def test_parts_with_masks_go_around_a_ring() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 2, 2]])
    of_documents = (documents[:, None, :, None] == documents[:, None, None, :]) & torch.ones(8, 8).bool().tril()
    shapes = (2, 4, 8, 4), (2, 2, 8, 4), (2, 2, 8, 6)
    blind = torch.rand(8, 8) > 0.2
    blind[3] = False  # a query that sees nothing
    for mask in (of_documents, blind, torch.rand(2, 1, 1, 8) > 0.3, f64(4, 8, 8, grad=False)):
        for num_ranks in (2, 4):
            assert "ring" in _roles_checked(num_ranks, *(f64(*shape) for shape in shapes), mask, enable_gqa=True)
    op, _ = make_op(OP, *(f64(*shape) for shape in shapes), f64(8, 8), enable_gqa=True)
    assert not any(signature.role == "ring" for signature in signatures_of(op))  # a mask that is trained


def test_scores_without_a_kernel_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "_MOST_SCORES", 60)
    uneven = f64(2, 4, 8, 4), f64(2, 4, 8, 4), f64(2, 4, 8, 6)  # the features of values are others: no kernel
    assert _roles_checked(2, *uneven, None, 0.0, True) == {"queries", "ring"}
    assert _roles_checked(2, *uneven, torch.rand(8, 8) > 0.3) == {"ring"}


def test_heads_that_an_axis_does_not_divide_read_whole_key_heads() -> None:
    for num_heads, num_key_heads, num_ranks in ((8, 2, 4), (12, 4, 3), (6, 3, 2), (12, 4, 6)):
        keys = f64(2, num_key_heads, 8, 4), f64(2, num_key_heads, 8, 4)
        assert "key_heads" in _roles_checked(num_ranks, f64(2, num_heads, 8, 4), *keys, enable_gqa=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_tensors_whose_features_do_not_lie_next_to_one_another(is_causal: bool) -> None:
    strided = [torch.randn(2, 4, 3, 8, dtype=torch.float64).mT for _ in range(4)]
    grad, *leaves = strided[0], *(x.requires_grad_() for x in strided[1:])
    truth = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=0.4)
    block, scores = attention_blocks.Block(slice(0, 8), slice(0, 8), is_causal), attention_blocks.Scores(0.4)
    given = tuple(x.detach() for x in leaves)
    merged = attention_blocks.Merged(given[0], given[2])
    scores.forward(block, *given, merged)
    found = tuple(torch.zeros_like(x) for x in given)
    scores.backward(block, given, grad, merged.out.mT.contiguous().mT, merged.sums, found)
    torch.testing.assert_close(merged.out, truth)
    torch.testing.assert_close(found, torch.autograd.grad(truth, leaves, grad))


def test_dropped_scores_are_not_split_by_features():
    op, _ = make_op(OP, *QKV, None, 0.5)
    found = {str(signature) for signature in signatures_of(op)}
    assert "B* B* S(3) -> S(3)" not in found
    assert "B* B* P -> P" in found
