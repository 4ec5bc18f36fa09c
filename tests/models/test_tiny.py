"""Tiny models of transformers, of all kinds that can be made from a configuration, beside one device."""

import pytest

from tests.models.beside_one_device import plan_for, worst_of
from tests.models.names import FEW, NAMES
from tests.workers import Ranks


@pytest.mark.multirank
@pytest.mark.parametrize("name", FEW)
def test_a_few(ranks4: Ranks, name: str) -> None:
    assert worst_of(ranks4, name, plan_for(name)) < 1


@pytest.mark.multirank
@pytest.mark.parametrize("name", NAMES)
def test_each(ranks4: Ranks, name: str) -> None:
    assert worst_of(ranks4, name, plan_for(name)) < 1
