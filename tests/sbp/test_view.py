"""What the view rules offer, and that strategies of several axes are right too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.sbp.candidates import strategies_of
from autopar.sbp.rules import cast, view
from autopar.sbp.rules.view import dim_groups
from tests.sbp.rulecheck import check_rule, check_strategy, make_op, offered
from tests.sbp.samples import calls, f64


def test_heads_split_as_the_leading_part_of_the_hidden_dim() -> None:
    assert offered("reshape.default", f64(2, 5, 12), (2, 5, 4, 3)) == {
        "S(0) -> S(0)",
        "S(1) -> S(1)",
        "S(2) -> S(2)",
        "P -> P",
    }
    assert offered("reshape.default", f64(2, 5, 4, 3), (2, 5, -1)) == {
        "S(0) -> S(0)",
        "S(1) -> S(1)",
        "S(2) -> S(2)",
        "P -> P",
    }
    assert offered("reshape.default", f64(2, 5, 12), (10, 12)) == {"S(0) -> S(0)", "S(2) -> S(1)", "P -> P"}


def test_expanded_dim_splits_from_a_whole_input() -> None:
    assert offered("expand.default", f64(4, 1, 6), (4, 3, -1)) == {
        "S(0) -> S(0)",
        "B* -> S(1)",
        "S(2) -> S(2)",
        "P -> P",
    }
    assert offered("repeat.default", f64(1, 6), (4, 2)) == {"B* -> S(0)", "P -> P"}


def test_a_dim_that_squeezing_names_is_never_split() -> None:
    assert offered("squeeze.dim", f64(4, 6), 0) == {"S(1) -> S(1)", "P -> P"}
    assert offered("squeeze.default", f64(4, 6)) == {"P -> P"}


def test_a_slice_of_everything_splits_everywhere() -> None:
    assert offered("slice.Tensor", f64(4, 6), 1, 0, 2**63 - 1) == {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"}
    assert offered("slice.Tensor", f64(4, 6), 1, 0, 5) == {"S(0) -> S(0)", "P -> P"}


def test_padding_with_a_number_breaks_sums() -> None:
    assert offered("pad.default", f64(4, 6), (1, 1), "constant", 1.0) == {"S(0) -> S(0)"}
    assert offered("pad.default", f64(4, 6), (1, 1)) == {"S(0) -> S(0)", "P -> P"}


def test_pieces_all_follow() -> None:
    assert offered("split.Tensor", f64(4, 6), 3, 1) == {"S(0) -> S(0) S(0)", "P -> P P"}
    assert offered("stack.default", [f64(4), f64(4)], 0) == {"S(0) S(0) -> S(1)", "P P -> P"}


@pytest.mark.parametrize("target", [*view.RULES, *cast.RULES])
def test_strategies_of_two_axes(target: str) -> None:
    check_strategies(target, (2, 3))


@pytest.mark.parametrize("target", [*view.RULES, *cast.RULES])
def test_strategies_of_two_equal_axes(target: str) -> None:
    check_strategies(target, (2, 2))


def check_strategies(target: str, mesh_shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for args, kwargs in calls()[target]:
        op, inputs = make_op(target, *args, **kwargs)
        for strategy in strategies_of(op, mesh_shape):
            assert check_strategy(op, strategy, mesh_shape, inputs), f"{target}: {strategy} is not even"


shapes = st.lists(st.sampled_from([1, 1, 2, 3, 4, 6]), max_size=4).map(tuple)


@settings(max_examples=60)
@given(shapes, st.randoms())
def test_any_reshape(shape: tuple[int, ...], random: object) -> None:
    """Regroup the prime factors of `shape` at random."""
    factors = [p for size in shape for p in {4: (2, 2), 6: (2, 3)}.get(size, (size,))]
    random.shuffle(factors)
    cuts = sorted(random.sample(range(len(factors) + 1), min(2, len(factors))))
    target = tuple(math.prod(factors[i:j]) for i, j in zip([0, *cuts], [*cuts, len(factors)]))
    groups = dim_groups(shape, target)
    assert all(math.prod(shape[i] for i in ins) == math.prod(target[j] for j in outs) for ins, outs in groups)
    op, inputs = make_op("aten.reshape.default", f64(*shape), target)
    check_rule(op, inputs)
