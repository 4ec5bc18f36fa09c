"""Attention on shards against the op itself."""

import torch

from tests.sbp.exercise import exercise, exercise_mesh, f64

OP = "aten.scaled_dot_product_attention.default"
QKV = f64(2, 4, 6, 8), f64(2, 4, 10, 8), f64(2, 4, 10, 12)


def test_batch_heads_queries_and_features():
    assert exercise(OP, *QKV) == {
        "B B B -> B",
        "B* B* B* -> B*",
        "S(0) S(0) S(0) -> S(0)",
        "S(1) S(1) S(1) -> S(1)",
        "S(2) B* B* -> S(2)",
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


def test_causal_queries_over_two_axes_and_beside_heads():
    args = f64(2, 4, 8, 4), f64(2, 4, 8, 4), f64(2, 4, 8, 4), None, 0.0, True
    assert exercise_mesh(OP, *args, scale=0.3, roles=("queries", "queries")) == 1
    assert exercise_mesh(OP, *args, roles=("split", "queries")) == 3


def test_dropped_scores_are_not_split_by_features():
    from autopar.sbp.op_signatures import signatures_of
    from tests.sbp.rulecheck import make_op

    op, _ = make_op(OP, *QKV, None, 0.5)
    found = {str(signature) for signature in signatures_of(op)}
    assert "B* B* S(3) -> S(3)" not in found
    assert "B* B* P -> P" in found
