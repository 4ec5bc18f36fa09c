"""Fixtures shared by all tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.workers import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four gloo ranks; started at the first call."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks8() -> Iterator[Ranks]:
    """Eight gloo ranks; started at the first call."""
    ranks = Ranks(8)
    yield ranks
    ranks.stop()
