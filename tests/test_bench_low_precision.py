"""Loss curves in bfloat16: saved ones are within the spread of two seeds, and short ones are those of one device."""

import pytest

from bench.low_precision import MODELS, RUNS, SEEDS, SMOOTH, TITLE, curve, distance
from bench.report import load
from tests.workers import Ranks

IN_BFLOAT16 = [run for run in RUNS if run.startswith("bfloat16")]


def test_the_distance_of_curves_is_that_of_means_of_windows() -> None:
    up = [float(number // SMOOTH) for number in range(3 * SMOOTH)]
    assert distance(up, up) == 0 and distance(up, [0.0] * 3 * SMOOTH) == pytest.approx(1.0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("run", IN_BFLOAT16)
def test_saved_curves_are_within_the_spread_of_two_seeds(model: str, run: str) -> None:
    losses = {row["run"]: row["losses"] for row in load("low_precision")[TITLE] if row["model"] == model}
    first, other = (losses[f"float32, one device, seed {seed}"] for seed in SEEDS)
    assert distance(losses[run], first) <= distance(other, first)
    assert losses[run][-1] < losses[run][0]


@pytest.mark.multirank
@pytest.mark.parametrize("model", MODELS)
def test_a_short_curve_is_that_of_one_device_but_for_rounding(ranks4: Ranks, model: str) -> None:
    first, other = (curve(ranks4, model, run, 6).losses for run in ("float32, one device, seed 0", IN_BFLOAT16[0]))
    assert other == pytest.approx(first, rel=0.02) and other != first
