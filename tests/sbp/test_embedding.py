"""Lookups on shards against the op itself."""

import torch

from autopar.ir.lookups.even_bags import EVEN_BAGS
from tests.sbp.exercise import exercise, exercise_mesh, f64

IDS = torch.tensor([[0, 7, 3, 3], [5, 1, 2, 7]])


def test_embedding_splits_ids_rows_and_columns():
    assert exercise("aten.embedding.default", f64(8, 6), IDS) == {
        "B B -> B",
        "B* B -> B*",
        "B* S(0) -> S(0)",
        "B* S(1) -> S(1)",
        "S(0) B -> P [rows]",
        "S(1) B -> S(2)",
        "P B -> P",
    }


def test_padding_row_has_no_gradient_on_whichever_rank_it_lies():
    for padding_idx in (0, 3, 7):
        exercise("aten.embedding.default", f64(8, 6), IDS, padding_idx)


def test_gradient_scaled_by_frequency_is_split_by_columns_only():
    found = exercise("aten.embedding.default", f64(8, 6), IDS, -1, True)
    assert found == {"B B -> B", "B* B -> B*", "S(1) B -> S(2)", "P B -> P"}


def test_rows_over_two_axes_and_beside_other_splits():
    assert exercise_mesh("aten.embedding.default", f64(8, 6), IDS, 5, roles=("rows", "rows")) == 1
    assert exercise_mesh("aten.embedding.default", f64(8, 6), IDS, 5, roles=("rows", "split")) == 3


def test_one_hot():
    assert exercise("aten.one_hot.default", IDS, 8) == {"B -> B", "S(0) -> S(0)", "S(1) -> S(1)"}
    assert exercise("aten.one_hot.default", IDS) == {"B -> B"}


BAGS = (torch.tensor([0, 7, 3, 3, 5, 1]), torch.tensor([0, 2, 3]))


def test_bags_split_rows_and_columns():
    sums = {"B B B -> B B B B", "B* B B -> B* B B B", "P B B -> P B B B", "S(1) B B -> S(1) B B B"}
    assert exercise("aten.embedding_bag.default", f64(8, 6), *BAGS) == sums | {"S(0) B B -> P B B B [rows]"}
    assert exercise("aten.embedding_bag.default", f64(8, 6), *BAGS, False, 1) == sums
    exercise("aten.embedding_bag.padding_idx", f64(8, 6), *BAGS, False, 0, False, None, False, 3)
    exercise("aten.embedding_bag.default", f64(8, 6), *BAGS, False, 0, False, f64(6, grad=False))
    assert exercise_mesh("aten.embedding_bag.default", f64(8, 6), *BAGS, roles=("rows", "rows")) == 1


def test_bags_of_one_size_split_by_bags_too():
    columns, bags = {"B B -> B", "B* B -> B*", "S(1) B -> S(1)"}, {"B* S(0) -> S(0)"}
    sums = {"P B -> P", "B* S(1) -> P", "S(0) B -> P [rows]"}
    assert exercise(EVEN_BAGS, f64(8, 6), IDS, None, 0, False, 3) == columns | bags | sums
    assert exercise(EVEN_BAGS, f64(8, 6), IDS, None, 1, False, 7) == columns | bags | {"P B -> P"}
    assert exercise(EVEN_BAGS, f64(8, 6), IDS, None, 2, False, -1) == columns | bags
    assert exercise(EVEN_BAGS, f64(8, 6), IDS, None, 0, True, -1) == columns | {"P B -> P"}
    exercise(EVEN_BAGS, f64(8, 6), IDS, f64(2, 4, grad=False), 0, False, -1)
    exercise(EVEN_BAGS, f64(8, 6), IDS, f64(2, 4), 0, False, -1)
    assert exercise_mesh(EVEN_BAGS, f64(8, 6), IDS, None, 0, False, 3, roles=("rows", "rows")) == 1
