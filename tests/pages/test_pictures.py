"""The pictures of the site are those that their script draws."""

import runpy
import xml.etree.ElementTree as ET

import pytest

from tests.pages.blocks import ROOT

FOLDER = ROOT / "docs" / "pictures"
PICTURES = runpy.run_path(str(FOLDER / "draw.py"))["PICTURES"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    drawn = PICTURES[name]()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "run python docs/pictures/draw.py"
    ET.fromstring(drawn)
