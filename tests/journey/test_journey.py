"""Every case of the journey gives one device's numbers or is refused by name; no case may be silently wrong.

`make test` runs every sixteenth case in one setting, another than the next one's; `make test-full` all cases in two
settings (`tests/long.txt`); `make test-journey` all cases in all settings.
"""

import re
from collections.abc import Collection
from functools import lru_cache

import pytest

from tests.journey.case import THEMES, Case, cases_of
from tests.journey.runs import Outcome, difference, outcomes_of, truth
from tests.workers import Ranks

pytestmark = pytest.mark.multirank

NTH = 16
EVERYTHING = [found for theme in THEMES for found in cases_of(theme).values()]


def _settings(number: int, found: Case) -> tuple[str, ...]:
    """Those of the case, the one that is its turn first."""
    turn = number // NTH % len(found.on)
    return found.on[turn:] + found.on[:turn]


def _params(remainders: Collection[int], turns: slice) -> list:
    """The cases whose number is one of `remainders` modulo NTH, each in its settings number `turns`."""
    chosen = []
    for number, found in enumerate(EVERYTHING):
        if number % NTH not in remainders:
            continue
        for setting in _settings(number, found)[turns]:
            chosen.append(pytest.param(found, setting, id=f"{found.theme}-{found.name}-{setting.replace(' ', '')}"))
    return chosen


class Outcomes:
    """What came of the cases that this session has chosen; those of a theme in a setting run in one call."""

    def __init__(self, ranks: Ranks, items: list[pytest.Item]) -> None:
        self._ranks = ranks
        self._chosen: dict[tuple[str, str], list[str]] = {}
        self._found: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            if isinstance(found := parameters.get("found"), Case) and "setting" in parameters:
                self._chosen.setdefault((found.theme, parameters["setting"]), []).append(found.name)

    def of(self, found: Case, setting: str) -> list[Outcome]:
        key = found.theme, setting
        if key not in self._found:
            self._found[key] = outcomes_of(self._ranks, found.theme, tuple(self._chosen[key]), setting)
        return self._found[key][found.name]


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, ranks4: Ranks) -> Outcomes:
    return Outcomes(ranks4, request.session.items)


@lru_cache(maxsize=1024)
def _truth(theme: str, name: str) -> dict:
    return truth(theme, name)


@lru_cache(maxsize=1024)
def _error(theme: str, name: str) -> str:
    """What one device raises; "" if nothing."""
    try:
        truth(theme, name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _fault(found: Case, setting: str, outcomes: list[Outcome]) -> str:
    """What is not as the case expects; "" if all is."""
    if setting not in found.refused:
        return difference(outcomes, _truth(found.theme, found.name), found.tolerance)
    for rank, outcome in enumerate(outcomes):
        if not outcome.error:
            return f"rank {rank}: not refused"
        is_refusal = outcome.is_refusal or outcome.error == _error(found.theme, found.name)
        if not is_refusal or not re.search(found.refused[setting], outcome.error, re.DOTALL):
            return f"rank {rank}: expected to be refused with {found.refused[setting]!r}, found {outcome.error}"
    return ""


def _check(found: Case, setting: str, outcomes: Outcomes) -> None:
    fault = _fault(found, setting, outcomes.of(found, setting))
    if setting not in found.wrong:
        assert not fault, fault
        return
    assert fault, f"expected to fail ({found.wrong[setting]}), and does not: strike it out"
    assert re.search(found.wrong[setting], fault, re.DOTALL), f"expected to fail otherwise: {fault}"
    pytest.xfail(fault)


@pytest.mark.parametrize(("found", "setting"), _params({0}, slice(1)))
def test_case(found: Case, setting: str, outcomes: Outcomes) -> None:
    _check(found, setting, outcomes)


@pytest.mark.parametrize(("found", "setting"), _params(range(1, NTH), slice(1)))
def test_further_case(found: Case, setting: str, outcomes: Outcomes) -> None:
    _check(found, setting, outcomes)


@pytest.mark.parametrize(("found", "setting"), _params(range(NTH), slice(1, 2)))
def test_case_in_another_setting(found: Case, setting: str, outcomes: Outcomes) -> None:
    _check(found, setting, outcomes)


@pytest.mark.journey
@pytest.mark.parametrize(("found", "setting"), _params(range(NTH), slice(2, None)))
def test_case_in_its_other_settings(found: Case, setting: str, outcomes: Outcomes) -> None:
    _check(found, setting, outcomes)
