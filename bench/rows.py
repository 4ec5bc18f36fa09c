"""Which rows of a benchmark a command runs: `--rows REGEX` and `--resume`, the same for every benchmark."""

import argparse
import re
from collections.abc import Iterable

from bench.report import commit, load


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name matches; the result file keeps the others")
    made.add_argument("--resume", action="store_true", help="leave out rows that the result file has from this commit")
    return made


def selected(names: Iterable[str], settings: argparse.Namespace, name: str, title: str) -> list[str]:
    """The names of rows of the table `title` of result file `name` that are asked for."""
    here = commit()
    done = {row["row"] for row in load(name).get(title, ()) if row["measured"]["commit"] == here} if settings.resume else set()
    return [one for one in names if re.search(settings.rows, one) and one not in done]
