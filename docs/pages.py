"""Hooks of mkdocs: `<!-- cli -->` becomes the help of the command, and nothing is fetched when a page is viewed."""

import argparse
import os
import re
from typing import Any

from mkdocs.exceptions import PluginError

from autopar.cli.main import _parser


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the help of each subcommand in the place of the mark."""
    return markdown.replace("<!-- cli -->", _commands()) if "<!-- cli -->" in markdown else markdown


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The page as it is; PluginError if a browser would fetch anything for it from elsewhere."""
    if found := re.search(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*', output):
        raise PluginError(f"{page.file.src_path}: {found[0]} is fetched from elsewhere; put it into docs")
    return output


def _commands() -> str:
    os.environ["COLUMNS"] = "110"  # argparse wraps its help at the width of the terminal
    (subparsers,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    texts = {each.dest: each.help for each in subparsers._choices_actions}
    return "\n\n".join(
        f"## autopar {name}\n\n{texts[name].capitalize()}.\n\n```text\n{parser.format_help().strip()}\n```"
        for name, parser in subparsers.choices.items()
    )
