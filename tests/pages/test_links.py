"""Links of the README and of the pages lead somewhere; mkdocs checks those between pages (`make docs`)."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.pages.blocks import ROOT, pages

_CODE = re.compile(r"```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


def links(text: str) -> list[str]:
    return _LINK.findall(_CODE.sub("", text))


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", _CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def broken(link: str, page: Path) -> str:
    """Why a link is broken; empty if it is not. No network: of an address elsewhere the form is checked."""
    address = urlsplit(link)
    if address.scheme or address.netloc:
        return "" if address.scheme == "https" and "." in address.netloc else "not https://host/..."
    target = (page.parent / address.path).resolve() if address.path else page
    if not target.exists():
        return "no such file"
    if address.fragment and target.suffix == ".md" and address.fragment not in anchors(target.read_text()):
        return "no such heading"
    return ""


@pytest.mark.parametrize("page", pages())
def test_links(page: str) -> None:
    path = ROOT / page
    found = {link: why for link in links(path.read_text()) if (why := broken(link, path))}
    assert not found, f"{page}: {found}"


def test_broken_links_are_noticed() -> None:
    readme = ROOT / "README.md"
    assert broken("docs/none.md", readme) == "no such file"
    assert broken("#none", readme) == "no such heading"
    assert broken("http:/x", readme) == "not https://host/..."
    assert not broken("docs/glossary.md#search", readme)
