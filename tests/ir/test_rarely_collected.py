import gc

import pytest

from autopar.ir.rarely_collected import rarely_collected


@pytest.fixture(autouse=True)
def as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_thresholds_come_back_whatever_happens():
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), rarely_collected():
        assert gc.get_threshold() > before
        raise ZeroDivisionError
    assert gc.get_threshold() == before


@pytest.mark.parametrize("thresholds", [(0, 10, 10), (10**6, 10**3, 10**3)], ids=str)
def test_a_caller_who_collects_less_is_left_alone(thresholds):
    gc.set_threshold(*thresholds)
    with rarely_collected():
        assert gc.get_threshold() == thresholds
