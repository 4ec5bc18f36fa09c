"""Models straight from other libraries beside one device; `make test-libraries` has these libraries."""

from importlib.util import find_spec

import pytest

from tests.models.beside_one_device import plan_for, worst_of
from tests.models.of_libraries import MODELS
from tests.workers import Ranks


@pytest.mark.skipif(find_spec("timm") is None, reason="in .venv-libraries")
@pytest.mark.multirank
@pytest.mark.parametrize("name", MODELS)
def test_each(ranks4: Ranks, name: str) -> None:
    assert worst_of(ranks4, name, plan_for(name)) < 1
