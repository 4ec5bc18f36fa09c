"""The reference has every public name."""

import re

import autopar
from tests.pages.blocks import ROOT


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    named = set(re.findall(r"^::: autopar\.[\w.]+\.(\w+)$", page, re.MULTILINE))
    assert set(autopar.__all__) <= named
