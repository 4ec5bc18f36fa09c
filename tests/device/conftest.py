"""Ranks of the emulated device."""

from collections.abc import Iterator

import pytest

from tests.device import shared_gpu
from tests.device.nccl_rules import start
from tests.workers import Ranks


@pytest.fixture(scope="session")
def device_ranks() -> Iterator[Ranks]:
    """Four ranks on a device of their own, whose groups keep NCCL's rules; started at the first call."""
    ranks = Ranks(4, start)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Ranks]:
    """Four ranks that share the GPUs there are; started at the first call."""
    ranks = Ranks(4, shared_gpu.start)
    yield ranks
    ranks.stop()
