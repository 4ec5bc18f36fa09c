"""Result files: `RESULTS/NAME.json`, rows by table, and the same for people in `NAME.md`.

A run adds to its file: it replaces the rows that it ran and leaves the others. So each row says by itself under
"provenance" with which commit, on which day, on which machine and with which settings it was made; under "row" is its
name, unique in its table.
"""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]
Cells = tuple[str, ...]
Document = Mapping[str, Sequence[Row]]  # title of a table -> its rows


@dataclass(frozen=True)
class Table:
    """One table of a result file. rows: the names of all rows that the benchmark has, in order; a row of another name
    is one of an older benchmark. cells: of a row, its lines for people; a row with an "error" has one that says so."""

    title: str
    text: str
    header: Cells
    rows: tuple[str, ...]
    cells: Callable[[Row], Iterable[Cells]]


def load(name: str) -> dict[str, list[Row]]:
    """The rows of a result file by table; none if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def add(name: str, tables: Sequence[Table], found: Mapping[str, Iterable[Row]], settings: Mapping[str, Any]) -> None:
    """Put the rows of `found`, by title of their table, into `RESULTS/NAME.json`, and write all of it as `NAME.md`."""
    saved, made = load(name), {**where(), **settings}
    document = {}
    for table in tables:
        rows = {row["row"]: row for row in saved.get(table.title, ())}
        rows |= {row["row"]: row | {"provenance": made} for row in found.get(table.title, ())}
        document[table.title] = [rows[key] for key in table.rows if key in rows]
    RESULTS.mkdir(exist_ok=True)
    _write(RESULTS / f"{name}.json", json.dumps(document, indent=1) + "\n")
    _write(RESULTS / f"{name}.md", to_markdown(tables, document))


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a run that is interrupted loses no rows of others."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    part.replace(path)


def to_markdown(tables: Iterable[Table], document: Document) -> str:
    """Every table that has rows, each with where its rows were measured."""
    return "\n".join(_section(table, document[table.title]) for table in tables if document.get(table.title))


def _section(table: Table, rows: Sequence[Row]) -> str:
    lines = [(*line, *[""] * (len(table.header) - len(line))) for row in rows for line in _lines(table, row)]
    body = tabulate(lines, table.header, tablefmt="github", disable_numparse=True)
    missing = len(table.rows) - len(rows)
    lacks = [f"- rows not measured yet: {missing} of {len(table.rows)}"] if missing else []
    return "\n".join(
        [f"## {table.title}", "", *([table.text, ""] if table.text else []), body, "", *provenance(rows), *lacks, ""]
    )


def _lines(table: Table, row: Row) -> Iterable[Cells]:
    return [(row["row"], row["error"][:200])] if "error" in row else table.cells(row)


def provenance(rows: Sequence[Row]) -> list[str]:
    """A line for each way in which rows were measured, with the names of the rows unless it is the same for all."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        said = ", ".join(f"{key} {_said(x)}" for key, x in row["provenance"].items())
        groups.setdefault(said, []).append(row["row"])
    return [f"- {said}" + (f": {'; '.join(names)}" if len(groups) > 1 else "") for said, names in groups.items()]


def _said(x: Any) -> str:
    return " ".join(map(str, x)) if isinstance(x, list) else str(x)


def where() -> dict[str, str]:
    """Commit, day and machine: what every figure depends on."""
    return {"commit": commit(), "date": datetime.date.today().isoformat(), **machine()}


def commit() -> str:
    """The commit measured, with "+" if the code of the package or of the benchmarks has changes."""
    code = ("autopar", "bench/*.py")
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        return head + (
            "+" if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *code], check=False).returncode else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, str]:
    """Processors and the version of torch."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {"machine": f"{os.cpu_count()} x {names[0] if names else platform.machine()}", "torch": torch.__version__}
