"""Softmax and its kin on shards against the op itself."""

import pytest
import torch

from autopar.sbp.rules.softmax import RULES
from tests.sbp.exercise import exercise, exercise_mesh, f64

TARGETS = [target for target in RULES if "logsumexp" not in target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dim", [1, -1])
def test_rows_split_plainly_and_the_reduced_dim_with_a_role(target, dim):
    found = exercise(target, f64(2, 4, 6), dim)
    reduced = dim % 3
    assert f"S({reduced}) -> S({reduced}) [reduced]" in found
    assert len(found) == 5


@pytest.mark.parametrize("target", TARGETS)
def test_masked_and_large_scores(target):
    x = f64(4, 6, grad=False) * 1000
    x[0, :3] = -torch.inf
    if "safe" in target:
        x[1] = -torch.inf
    exercise(target, x.requires_grad_(), -1)


@pytest.mark.parametrize("target", TARGETS)
def test_two_axes(target):
    assert exercise_mesh(target, f64(4, 8), -1, roles=("reduced", "reduced")) == 1
    assert exercise_mesh(target, f64(4, 8), -1, roles=("split", "reduced")) == 1


def test_logsumexp():
    assert exercise("aten.logsumexp.default", f64(2, 4, 6), [1]) == {
        "B -> B",
        "B* -> B*",
        "S(0) -> S(0)",
        "S(1) -> B [reduced]",
        "S(2) -> S(1)",
    }
    assert "S(2) -> S(2)" in exercise("aten.logsumexp.default", f64(2, 4, 6), [0, 1], True)
    assert exercise_mesh("aten.logsumexp.default", f64(4, 4), [0, 1], roles=("reduced", "reduced")) == 4


def test_logsumexp_of_minus_infinity():
    x = f64(2, 4, grad=False)
    x[0] = -torch.inf
    exercise("aten.logsumexp.default", x, [1])
