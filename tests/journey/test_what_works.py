"""docs/what_works.md is of all cases there are, and says what they expect."""

import json
import re

import pytest

from tests.journey.case import PEERS, THEMES, Case, cases_of
from tests.journey.what_works import AS_THERE, COMMAND, DOC, RESULTS, SAME, what_works

CASES = [found for theme in THEMES for found in cases_of(theme).values()]


def test_the_document_is_of_the_results() -> None:
    assert DOC.read_text() == what_works(json.loads(RESULTS.read_text())), f"run {COMMAND} --render"


def test_the_results_are_of_the_cases() -> None:
    results = json.loads(RESULTS.read_text())
    measured = {
        (theme, name, setting) for theme in results for name, row in results[theme]["cases"].items() for setting in row
    }
    wanted = {
        (found.theme, found.name, setting)
        for found in CASES
        for setting in (*found.on, *(PEERS if found.peers else ()))
    }
    assert measured == wanted, f"run {COMMAND} {' '.join(sorted({theme for theme, *_ in measured ^ wanted}))}"


@pytest.mark.parametrize("found", CASES, ids=lambda found: f"{found.theme}-{found.name}")
def test_the_results_are_what_the_case_expects(found: Case) -> None:
    row = json.loads(RESULTS.read_text())[found.theme]["cases"][found.name]
    for setting in found.on:
        kind = "refused|" + AS_THERE if setting in found.refused else "(?!same)" if setting in found.wrong else SAME
        assert re.match(kind, row[setting]), f"{setting}: {row[setting]}; run {COMMAND} {found.theme}"
