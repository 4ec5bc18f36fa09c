"""The table of unequal devices beside what the speeds alone say."""

import pytest

from bench.unequal import EACH, MEASURED, measure, shared


@pytest.mark.parametrize(("model", "least"), [("ResNet50", 1.32), ("BERT", 1.18), ("VGG19", 1.22), ("Swin", 1.21)])
def test_shares_gain_what_the_speeds_allow(model: str, least: float) -> None:
    rows, fast_s, slow_s = MEASURED[model]
    row, (found, _) = measure(model, 4), shared(model, 4)
    assert sum(found.sizes) == 2 * EACH * rows * 4
    assert least <= row["over equal shares, times"] <= row["ideal, times"]
    assert row["ideal, times"] == pytest.approx(slow_s * (1 / fast_s + 1 / slow_s) / 2)
    assert row["peak flop/s, times"] < row["over equal shares, times"]
