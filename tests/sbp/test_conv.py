"""Convolutions on shards against the op itself."""

import pytest

from autopar.sbp.candidates import strategies_of
from autopar.sbp.rules.conv import RULES
from tests.sbp.exercise import exercise, exercise_mesh, f64
from tests.sbp.rulecheck import make_op

SAMPLES = [
    ("conv1d.default", (f64(2, 4, 5), f64(6, 4, 3), f64(6), [2], [1], [1])),
    ("conv1d.padding", (f64(2, 4, 5), f64(6, 4, 3), None, [1], "same")),
    ("conv2d.default", (f64(2, 4, 5, 5), f64(6, 4, 3, 3), f64(6))),
    ("conv2d.default", (f64(2, 4, 5, 5), f64(6, 4, 3, 3))),
    ("conv2d.default", (f64(4, 5, 5), f64(6, 4, 3, 3), f64(6))),
    ("conv2d.default", (f64(2, 4, 5, 5), f64(8, 2, 3, 3), f64(8), [1, 1], [0, 0], [1, 1], 2)),
    ("conv2d.default", (f64(2, 4, 5, 5), f64(4, 1, 3, 3), f64(4), [1, 1], [0, 0], [1, 1], 4)),
    ("conv2d.padding", (f64(2, 4, 5, 5), f64(6, 4, 3, 3), f64(6), [1, 1], "same")),
    ("conv3d.default", (f64(2, 2, 3, 3, 3), f64(4, 2, 2, 2, 2), f64(4))),
    ("conv_transpose1d.default", (f64(2, 4, 5), f64(4, 6, 3), f64(6))),
    ("conv_transpose2d.input", (f64(2, 4, 5, 5), f64(4, 6, 3, 3), f64(6), [2, 2])),
    ("conv_transpose2d.input", (f64(2, 4, 5, 5), f64(4, 3, 3, 3), f64(6), [2, 2], [0, 0], [0, 0], 2)),
    ("conv_transpose3d.input", (f64(2, 4, 3, 3, 3), f64(4, 6, 2, 2, 2), f64(6))),
]


@pytest.mark.parametrize(("name", "args"), SAMPLES, ids=lambda value: value if isinstance(value, str) else "")
def test_every_signature_gives_the_ops_numbers(name, args):
    assert len(exercise(f"aten.{name}", *args)) > 4


def test_channel_groups_over_two_axes():
    args = (f64(4, 8, 3, 3), f64(8, 2, 2, 2), f64(8), [1, 1], [0, 0], [1, 1], 4)
    assert exercise_mesh("aten.conv2d.default", *args, roles=("channel_groups", "channel_groups")) == 1
    assert exercise_mesh("aten.conv2d.default", *args, roles=("split", "channel_groups")) == 1


def test_groups_are_not_cut():
    op, _ = make_op("aten.conv2d.default", f64(2, 8, 3, 3), f64(8, 4, 2, 2), None, [1, 1], [0, 0], [1, 1], 2)
    roles = [[sig.role for sig in strategy.signatures] for strategy in strategies_of(op, (2, 2))]
    assert ["channel_groups", ""] in roles
    assert ["channel_groups", "channel_groups"] not in roles


def test_every_rule_has_a_sample():
    assert {f"aten.{name}" for name, _ in SAMPLES} == set(RULES)
