"""What the reduction rules offer, and means over several axes."""

import pytest
import torch

from autopar.sbp.candidates import strategies_of
from tests.sbp.rulecheck import check_strategy, make_op, offered
from tests.sbp.samples import f64, ints, mask


def test_a_sum_over_a_split_dim_is_pending() -> None:
    assert offered("sum.dim_IntList", f64(4, 6, 2), (1,)) == {"S(0) -> S(0)", "S(2) -> S(1)", "S(1) -> P", "P -> P"}
    assert offered("sum.dim_IntList", f64(4, 6), (1,), True) == {"S(0) -> S(0)", "S(1) -> P", "P -> P"}
    assert offered("sum.default", f64(4, 6)) == {"S(0) -> P", "S(1) -> P", "P -> P"}
    assert offered("mean.dim", f64(4, 6), (-1,)) == {"S(0) -> S(0)", "S(1) -> P [mean]", "P -> P"}


def test_maxima_and_moments_keep_their_dim_whole() -> None:
    assert offered("amax.default", f64(4, 6), (1,)) == {"S(0) -> S(0)"}
    assert offered("max.dim", f64(4, 6), 1) == {"S(0) -> S(0) S(0)"}
    assert offered("var.correction", f64(4, 6, 2), (0, 1)) == {"S(2) -> S(0)"}
    assert offered("topk.default", f64(4, 6), 2) == {"S(0) -> S(0) S(0)"}


def test_counts_add_up_but_are_not_linear() -> None:
    op, _ = make_op("aten.count_nonzero.default", ints(4, 6))
    assert {str(strategy) for strategy in strategies_of(op, (2,))} == {"B -> B", "S(0) -> P", "S(1) -> P"}


def test_sums_without_missing_numbers_are_not_linear() -> None:
    """A number that is missing in one term is missing in the sum, and the other term would be counted."""
    one, other = torch.tensor([1.0, torch.nan]), torch.tensor([2.0, 5.0])
    assert (one + other).nansum() == 3 != one.nansum() + other.nansum()
    assert offered("nansum.default", f64(4, 6), (1,)) == {"S(0) -> S(0)", "S(1) -> P"}
    assert offered("nansum.default", f64(4, 6)) == {"S(0) -> P", "S(1) -> P"}
    assert offered("nanmean.default", f64(4, 6), (0,), True) == {"S(1) -> S(1)"}


def test_booleans_are_never_pending() -> None:
    op, _ = make_op("aten.sum.dim_IntList", mask(4, 6), (0,))
    assert {str(strategy) for strategy in strategies_of(op, (2,))} == {"B -> B", "S(0) -> P", "S(1) -> S(0)"}


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3)])
def test_a_mean_over_dims_split_by_two_axes(mesh_shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    op, inputs = make_op("aten.mean.dim", f64(4, 12, 3), (0, 1))
    found = strategies_of(op, mesh_shape)
    assert sum([check_strategy(op, strategy, mesh_shape, inputs) for strategy in found]) == len(found)
    assert any(str(strategy) == "S(1) -> P [mean] | S(1) -> P [mean]" for strategy in found)
