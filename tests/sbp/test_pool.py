"""Pooling and resizing on shards against the op itself."""

import pytest

from autopar.sbp.rules.pool import RULES
from tests.sbp.exercise import exercise, f64

X3, X4, X5 = f64(2, 4, 6), f64(2, 4, 6, 6), f64(2, 4, 4, 4, 4)

SAMPLES = [
    ("max_pool1d.default", (X3, [2])),
    ("max_pool1d_with_indices.default", (X3, [2])),
    ("max_pool2d.default", (X4, [3, 3], [2, 2], [1, 1])),
    ("max_pool2d.default", (X3, [2, 2])),
    ("max_pool2d_with_indices.default", (X4, [2, 2])),
    ("max_pool3d.default", (X5, [2, 2, 2])),
    ("adaptive_max_pool1d.default", (X3, [3])),
    ("adaptive_max_pool2d.default", (X4, [3, 2])),
    ("avg_pool1d.default", (X3, [2])),
    ("avg_pool2d.default", (X4, [3, 3], [1, 1], [1, 1], False, False)),
    ("avg_pool3d.default", (X5, [2, 2, 2])),
    ("adaptive_avg_pool1d.default", (X3, [3])),
    ("adaptive_avg_pool2d.default", (X4, [1, 1])),
    ("adaptive_avg_pool3d.default", (X5, [1, 1, 1])),
    ("avg_pool2d_backward.default", (f64(2, 4, 3, 3), X4, [2, 2], [2, 2], [0, 0], False, True, None)),
    ("avg_pool3d_backward.default", (f64(2, 4, 2, 2, 2), X5, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None)),
    ("_adaptive_avg_pool2d_backward.default", (f64(2, 4, 3, 2), X4)),
    ("_adaptive_avg_pool3d_backward.default", (f64(2, 4, 2, 2, 2), X5)),
    ("upsample_nearest1d.vec", (X3, None, [2.0])),
    ("upsample_nearest2d.vec", (X4, None, [2.0, 2.0])),
    ("upsample_linear1d.vec", (X3, None, False, [2.0])),
    ("upsample_bilinear2d.vec", (X4, [8, 9], False, None)),
    ("upsample_bicubic2d.vec", (X4, None, True, [2.0, 2.0])),
    ("adaptive_max_pool3d.default", (X5, [2, 2, 2])),
    ("_upsample_bicubic2d_aa.vec", (X4, [8, 9], False, None)),
    ("_upsample_bilinear2d_aa.vec", (X4, [8, 9], False, None)),
    ("_upsample_nearest_exact1d.vec", (X3, None, [2.0])),
    ("_upsample_nearest_exact2d.vec", (X4, [8, 9], None)),
    ("_upsample_nearest_exact3d.vec", (X5, None, [2.0, 2.0, 2.0])),
    ("upsample_nearest3d.vec", (X5, None, [2.0, 2.0, 2.0])),
    ("upsample_trilinear3d.vec", (X5, None, False, [2.0, 2.0, 2.0])),
]


@pytest.mark.parametrize(("name", "args"), SAMPLES, ids=lambda value: value if isinstance(value, str) else "")
def test_every_signature_gives_the_ops_numbers(name, args):
    found = exercise(f"aten.{name}", *args)
    is_linear, is_backward = "avg" in name or "upsample" in name, "backward" in name
    assert ("P B* -> P" if is_backward else "P -> P") in found or not is_linear
    assert any(text.startswith("S(0) S(0) -> S(0)" if is_backward else "S(0) -> S(0)") for text in found)


def test_every_rule_has_a_sample():
    assert {f"aten.{name}" for name, _ in SAMPLES} == set(RULES)
