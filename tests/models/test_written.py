"""Models as people write them, beside one device, on two batches."""

import pytest

from autopar.errors import AutoparError
from tests.models.beside_one_device import plan_for, worst_of
from tests.models.written.models import REFUSED, WRITTEN
from tests.workers import Ranks

# Losses over what a mask picks, loops over time, short and long, buffers that the forward writes.
FEW = ["by-hand:yolo", "by-hand:crf", "by-hand:vq-vae", "by-hand:selective-scan", "by-hand:decayed-memory"]


@pytest.mark.multirank
@pytest.mark.parametrize("name", FEW)
def test_a_few(ranks4: Ranks, name: str) -> None:
    assert worst_of(ranks4, name, plan_for(name)) < 1


@pytest.mark.multirank
@pytest.mark.parametrize("name", WRITTEN)
def test_each(ranks4: Ranks, name: str) -> None:
    assert worst_of(ranks4, name, plan_for(name)) < 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    with pytest.raises(AutoparError, match=REFUSED[name]):
        plan_for(name)
