"""`write_page`: a page as one HTML file, which fetches nothing: data, style, script and libraries are in it.

The content is JSON, compressed, in an element that no browser runs; the script puts names into the page as text. The
page's policy lets a browser run the scripts of this file alone, by their hashes, and fetch nothing.
"""

import base64
import hashlib
import html
import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from autopar.errors import AutoparError
from autopar.page.page_data import PageData
from autopar.plans.serialise import write

# In the order in which they are run; the first is made by `make page-library`.
_SCRIPTS = ("library.min.js", "format.js", "charts.js", "blocks.js", "sections.js", "page.js")


def can_write(path: str, option: str) -> None:
    """AutoparError, before minutes of work, for a path in a folder that is not there or cannot be written to."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise AutoparError(f"{option} {path}: there is no folder {str(folder)!r}; make it first")
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise AutoparError(f"{option} {path}: expected the name of a file that can be written")


def write_page(path: str, page: PageData) -> None:
    """Write the page, whole or not at all; AutoparError if that is impossible."""
    try:
        write(path, page_html(page))
    except OSError as error:
        raise AutoparError(f"the page cannot be written to {path!r}: {error.strerror or error}") from error


def page_html(page: PageData) -> str:
    """The text of the file."""
    folder = files("autopar.page") / "app"
    scripts = [(folder / name).read_text("utf-8") for name in _SCRIPTS]
    assert not any("</script" in script.lower() for script in scripts), "a script would end early"
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; script-src "
    )
    policy += " ".join(map(_hash, scripts))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(page.title)}</title>",
            f"<style>{(folder / 'page.css').read_text('utf-8')}</style></head>",
            '<body><div id="page"><noscript>This page is drawn by the script in it.</noscript></div>',
            f'<script type="text/plain" id="content">{page.packed()}</script>',
            f'<script type="text/plain" id="licences">{_licences(folder)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>",
            "",
        ]
    )


def _licences(folder: Traversable) -> str:
    """Whose libraries are in the page, and the text of their licences, which every copy has to have."""
    return (folder / "LICENSES.txt").read_text("utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
