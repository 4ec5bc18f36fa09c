"""A hook of mkdocs: fills `<!-- cli -->` with what the command's help says."""

import argparse
import os
from typing import Any

from autopar.cli.main import _parser


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the help of each subcommand in the place of the mark."""
    return markdown.replace("<!-- cli -->", _commands()) if "<!-- cli -->" in markdown else markdown


def _commands() -> str:
    os.environ["COLUMNS"] = "110"  # argparse wraps its help at the width of the terminal
    (subparsers,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    texts = {each.dest: each.help for each in subparsers._choices_actions}
    return "\n\n".join(
        f"## autopar {name}\n\n{texts[name].capitalize()}.\n\n```text\n{parser.format_help().strip()}\n```"
        for name, parser in subparsers.choices.items()
    )
