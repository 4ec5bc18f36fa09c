"""What the pointwise and cast rules offer; that it is right is test_rules_op_db's part."""

import torch

from tests.sbp.rulecheck import offered
from tests.sbp.samples import f64, mask


def test_broadcast_inputs_stay_whole_with_a_pending_gradient() -> None:
    assert offered("maximum.default", f64(4, 1, 6), f64(5, 1)) == {
        "S(0) B* -> S(0)",
        "B* S(0) -> S(1)",
        "S(2) B* -> S(2)",
    }


def test_sums_pass_what_is_linear_and_only_that() -> None:
    assert offered("add.Tensor", f64(4), f64(4)) == {"S(0) S(0) -> S(0)", "P P -> P"}
    assert offered("mul.Tensor", f64(4), f64(4)) == {"S(0) S(0) -> S(0)", "P B* -> P", "B* P -> P"}
    assert offered("div.Tensor", f64(4), f64(4)) == {"S(0) S(0) -> S(0)", "P B* -> P"}
    assert offered("div.Tensor_mode", f64(4), f64(4), rounding_mode="floor") == {"S(0) S(0) -> S(0)"}
    assert offered("mul.Scalar", f64(4), 2.0) == {"S(0) -> S(0)", "P -> P"}
    assert offered("add.Scalar", f64(4), 2.0) == {"S(0) -> S(0)"}
    assert offered("gelu.default", f64(4)) == {"S(0) -> S(0)"}


def test_only_a_fill_of_zero_passes_sums() -> None:
    assert "P B -> P" in offered("masked_fill.Scalar", f64(4), mask(4), 0.0)
    assert "P B -> P" not in offered("masked_fill.Scalar", f64(4), mask(4), float("-inf"))
    assert "B P P -> P" in offered("where.self", mask(4), f64(4), f64(4))


def test_casts_pass_sums_unless_they_round() -> None:
    assert "P -> P" in offered("to.dtype", f64(4), torch.float32)
    assert "P -> P" not in offered("to.dtype", f64(4), torch.int64)
    assert "P -> P" not in offered("to.dtype", mask(4), torch.float64)


def test_type_as_reads_only_the_dtype_of_the_other() -> None:
    assert offered("type_as.default", f64(4, 6), f64(3)) == {"S(0) B -> S(0)", "S(1) B -> S(1)", "P B -> P"}
