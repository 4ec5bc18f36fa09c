import math
from itertools import product

import pytest

from autopar.errors import AutoparError
from autopar.jobs.fair_shares import fair_shares, parse_mix
from tests.jobs.test_simulate_jobs import drawn


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_the_best_of_all(seed):
    _, curves = drawn(seed)
    models = ["a", "b", "a", "c"]
    found = fair_shares(models, curves, 16)
    sizes = product(*(curves[model].sizes for model in models))
    best = max(-sum(math.log(curves[m].step_s(n)) for m, n in zip(models, each)) for each in sizes if sum(each) <= 16)
    assert -sum(math.log(share.step_s) for share in found) == pytest.approx(best)
    assert sum(share.devices for share in found) <= 16


def test_jobs_that_do_not_fit_and_unknown_models_are_refused():
    _, curves = drawn(3)
    assert parse_mix("a, b:2", curves) == ("a", "b", "b")
    with pytest.raises(AutoparError, match=r"need .* devices at least, there are 2"):
        fair_shares(["a"] * 9, curves, 2)
    for text, message in (("x", "no steps of 'x'"), ("a:0", "a positive number")):
        with pytest.raises(AutoparError, match=message):
            parse_mix(text, curves)
