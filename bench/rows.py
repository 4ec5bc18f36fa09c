"""Which rows of a benchmark a command runs: `--rows REGEX` and `--resume`, the same for every benchmark."""

import argparse
import re
from collections.abc import Iterable

from bench.report import Table, commit, load


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--rows", default="", metavar="REGEX", help="only rows whose name matches; the result file keeps the others"
    )
    made.add_argument(
        "--resume", action="store_true", help="leave out rows that the result file has from this commit without error"
    )
    return made


def selected(tables: Iterable[Table], settings: argparse.Namespace, name: str) -> dict[str, list[str]]:
    """Of each table of result file `name` the rows that are asked for, in order; says so and ends where there are
    none.
    """
    here, saved = commit(), load(name) if settings.resume else {}
    found = {}
    for table in tables:
        done = {
            row["row"]
            for row in saved.get(table.title, ())
            if row["provenance"]["commit"] == here and "error" not in row
        }
        found[table.title] = [row for row in table.rows if re.search(settings.rows, row) and row not in done]
    if not any(found.values()):
        names = "; ".join(row for table in tables for row in table.rows)
        raise SystemExit(
            f"nothing to run: --rows {settings.rows!r} matches no row that is not measured yet; rows are {names}"
        )
    return found
