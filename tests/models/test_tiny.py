"""Tiny models of transformers, of all kinds that can be made from a configuration, beside one device."""

import pytest

from autopar.errors import AutoparError
from tests.models.beside_one_device import plan_for, worst_of
from tests.models.names import FEW, NAMES
from tests.models.table import results
from tests.workers import Ranks

SAID = results("models.md")


@pytest.mark.multirank
@pytest.mark.parametrize("name", FEW)
def test_a_few(ranks4: Ranks, name: str) -> None:
    assert worst_of(ranks4, name, plan_for(name)) < 1


@pytest.mark.multirank
@pytest.mark.parametrize("name", NAMES)
def test_each(ranks4: Ranks, name: str) -> None:
    """It is as docs/models.md says."""
    said = SAID[name]
    if said.startswith(("not built", "error")):  # not made small, or not by this configuration
        pytest.skip(said)
    if said.startswith("refused"):
        with pytest.raises(AutoparError):
            plan_for(name)
        return
    assert worst_of(ranks4, name, plan_for(name)) < 1


def test_every_model_is_in_the_table() -> None:
    assert set(NAMES) <= set(SAID)
