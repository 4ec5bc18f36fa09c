"""Each trainer, as its documentation shows it, has the numbers of one device, or is refused by name."""

import json
from collections.abc import Iterator

import pytest

from tests.trainers import runs
from tests.trainers.table import RESULTS
from tests.workers import Ranks

CASES = [(name, setting) for name in runs.names() for setting in runs.settings_of(name)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.stop()


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_trainer_has_the_numbers_of_one_device(ranks: Ranks, name: str, setting: str) -> None:
    expected = json.loads(RESULTS.read_text())[name]["outcomes"][setting]
    assert expected == runs.SAME or expected.startswith("refused: "), expected
    found = runs.outcome(ranks, name, setting)
    assert found == expected if expected == runs.SAME else found.startswith(expected.partition(": ")[0]), found
