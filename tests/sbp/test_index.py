"""What the index and creation rules offer."""

import pytest
import torch

from autopar.sbp.candidates import strategies_of
from autopar.sbp.localize import localize
from autopar.sbp.placement import I, S
from autopar.sbp.rules import index
from autopar.sbp.signature import Signature, Strategy
from tests.sbp.rulecheck import check_strategy, make_op, offered
from tests.sbp.samples import calls, f64, ints, mask


def test_parts_of_the_index_read_from_the_whole_source() -> None:
    assert offered("index_select.default", f64(4, 6), 0, ints(8)) == {"S(1) B -> S(1)", "B* S(0) -> S(0)", "P B -> P"}
    assert offered("gather.default", f64(4, 6), 1, ints(4, 2)) == {"S(0) S(0) -> S(0)", "B* S(1) -> S(1)", "P B -> P"}


def test_a_gather_that_cuts_a_dim_short_keeps_it_whole() -> None:
    assert offered("gather.default", f64(4, 6), 1, ints(2, 2)) == {"B* S(1) -> S(1)", "P B -> P"}


def test_indices_apart_come_first() -> None:
    found = offered("index.Tensor", f64(4, 6, 2), [ints(4), None, ints(4, high=2)])
    assert found == {"S(1) B B -> S(1)", "B* S(0) S(0) -> S(0)", "P B B -> P"}


def test_indices_that_are_neighbours_stay_in_place() -> None:
    found = offered("index.Tensor", f64(4, 6, 2), [None, ints(4), ints(4, high=2)])
    assert found == {"S(0) B B -> S(0)", "B* S(0) S(0) -> S(1)", "P B B -> P"}


def test_a_mask_reads_an_unknown_number() -> None:
    assert offered("index.Tensor", f64(4, 6), [mask(4)]) == set()


def test_what_parts_accumulate_is_a_sum() -> None:
    assert "P S(0) S(1) -> P" in offered("index_add.default", f64(4, 6), 1, ints(8), f64(4, 8))
    assert "P S(0) S(0) -> P" in offered("index_put.default", f64(4, 6), [ints(8)], f64(8, 6), True)
    assert "P S(0) S(0) -> P" not in offered("index_put.default", f64(4, 6), [ints(4)], f64(4, 6))
    assert "P B -> P" not in offered("scatter.value", f64(4, 6), 1, ints(4, 2), 1.0)


def test_new_tensors_are_made_in_parts() -> None:
    assert offered("zeros_like.default", f64(4, 6)) == {"S(0) -> S(0)", "S(1) -> S(1)", "P -> B", "P -> P"}


def test_sizes_of_new_tensors_become_local() -> None:
    op, _ = make_op("aten.full.default", (4, 6), 1.0, dtype=torch.float64)
    args, kwargs = localize(op, Strategy((Signature((), (S(1),)), Signature((), (I,)))), (2, 3))
    assert args == ((4, 3), 1.0)
    assert kwargs == (("dtype", torch.float64),)


@pytest.mark.parametrize("target", list(index.RULES))
def test_strategies_of_two_axes(target: str) -> None:
    torch.manual_seed(0)
    for args, kwargs in calls()[target]:
        op, inputs = make_op(target, *args, **kwargs)
        for strategy in strategies_of(op, (2, 2)):
            assert check_strategy(op, strategy, (2, 2), inputs), f"{target}: {strategy} is not even"
