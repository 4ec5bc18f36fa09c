"""Writes to dicts are seen, and nothing else is."""

from torch import nn

from autopar.runtime.checks.dict_versions import versions_of


def test_versions_of_dicts() -> None:
    dicts: list[dict] = [{}, {"a": 1}, nn.Linear(2, 2).__dict__]
    versions = versions_of(dicts)
    for each in dicts:
        before = versions()
        assert versions() == before
        each["new"] = 2
        assert versions() != before
    assert versions_of([])() == versions_of([])()
