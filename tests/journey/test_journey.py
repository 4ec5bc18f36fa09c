"""Every case of the journey gives one device's numbers or is refused by name; no case may be silently wrong.

`make test` runs every fourth case in one setting, another than the next one's; `make test-full` all cases in all
settings (`tests/long.txt`).
"""

import re
from functools import lru_cache

import pytest

from tests.journey.case import THEMES, Case, cases_of
from tests.journey.runs import Outcome, difference, run_on_rank, truth
from tests.workers import RankError, Ranks

pytestmark = pytest.mark.multirank
TIMEOUT_S = 120.0  # all cases of a theme in a setting

EVERYTHING = [found for theme in THEMES for found in cases_of(theme).values()]


def _settings(number: int, found: Case) -> tuple[str, ...]:
    """Those of the case, the one that is its turn first."""
    turn = number // 4 % len(found.on)
    return found.on[turn:] + found.on[:turn]


def _params(remainders: tuple[int, ...], is_first: bool) -> list:
    chosen = []
    for number, found in enumerate(EVERYTHING):
        if number % 4 not in remainders:
            continue
        first, *others = _settings(number, found)
        for setting in [first] if is_first else others:
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
            if isinstance(found := parameters.get("found"), Case):
                self._chosen.setdefault((found.theme, parameters["setting"]), []).append(found.name)

    def of(self, found: Case, setting: str) -> list[Outcome]:
        key = found.theme, setting
        if key not in self._found:
            self._found[key] = self._run(found.theme, setting, tuple(self._chosen[key]))
        return self._found[key][found.name]

    def _run(self, theme: str, setting: str, names: tuple[str, ...]) -> dict[str, list[Outcome]]:
        try:
            results = self._ranks.run(run_on_rank, theme, names, setting, timeout_s=TIMEOUT_S)
        except RankError as error:  # one of them ended the ranks: which?
            if len(names) == 1:
                return {names[0]: [Outcome({}, f"the ranks ended: {error}")]}
            return {name: self._run(theme, setting, (name,))[name] for name in names}
        return {name: [result[name] for result in results] for name in names}


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
        return difference(outcomes, _truth(found.theme, found.name))
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
    pytest.xfail(f"{found.wrong[setting]}: {fault}")


@pytest.mark.parametrize(("found", "setting"), _params((0,), is_first=True))
def test_case(found: Case, setting: str, outcomes: Outcomes) -> None:
    _check(found, setting, outcomes)


@pytest.mark.parametrize(("found", "setting"), _params((1, 2, 3), is_first=True))
def test_further_case(found: Case, setting: str, outcomes: Outcomes) -> None:
    _check(found, setting, outcomes)


@pytest.mark.parametrize(("found", "setting"), _params((0, 1, 2, 3), is_first=False))
def test_case_in_its_other_settings(found: Case, setting: str, outcomes: Outcomes) -> None:
    _check(found, setting, outcomes)
