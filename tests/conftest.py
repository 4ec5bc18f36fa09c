"""Fixtures shared by all tests."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.workers import Ranks

torch.set_num_threads(1)

# What an example takes on a loaded machine says nothing.
hypothesis.settings.register_profile("untimed", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("untimed")

# Plans of tests are for one and the same machine; their ranks and subprocesses inherit this.
os.environ.setdefault("AUTOPAR_CLUSTER", "cpu")

# `make test-trainers` runs these, in an environment of its own.
collect_ignore = [] if importlib.util.find_spec("trl") else ["trainers"]

# Tests, or single cases of them, that `make test` leaves to `make test-more`, and that this leaves to `make test-full`,
# a line each, by measured times.
THOROUGH, LONG = (Path(__file__).with_name(name) for name in ("thorough.txt", "long.txt"))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark those of `thorough.txt` and of `long.txt`."""
    for path, mark in ((THOROUGH, "thorough"), (LONG, "slow")):
        listed = set(path.read_text().splitlines())
        for item in items:
            if item.nodeid in listed or item.nodeid.split("[")[0] in listed:
                item.add_marker(mark)


_POOLS: list[Ranks] = []


def pytest_runtest_setup() -> None:
    """Start new ranks between two tests, not within one."""
    for pool in _POOLS:
        pool.replace_old()


def _pool(num_ranks: int) -> Iterator[Ranks]:
    ranks = Ranks(num_ranks)
    _POOLS.append(ranks)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four gloo ranks; started at the first call."""
    yield from _pool(4)


@pytest.fixture(scope="session")
def ranks8() -> Iterator[Ranks]:
    """Eight gloo ranks; started at the first call."""
    yield from _pool(8)
