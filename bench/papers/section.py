"""What is written about one paper: settings, tables with the published numbers beside ours, and what to know when reading them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from bench.report import RESULTS, commit, machine

Cells = Mapping[str, Any]  # column, with its unit -> number or text


@dataclass(frozen=True)
class Table:
    """Rows have the same columns; numbers are kept as they are for the JSON and rounded for people."""

    title: str
    rows: tuple[Cells, ...]


@dataclass(frozen=True)
class Section:
    """`settings`: what the calculation assumed. `not_found`: what the sources at hand do not say. `notes`: why ours differs."""

    name: str
    paper: str
    settings: Mapping[str, str]
    tables: tuple[Table, ...]
    not_found: tuple[str, ...]
    notes: tuple[str, ...]


def to_markdown(section: Section) -> str:
    """The section as people read it."""
    parts = [f"## {section.name}: {section.paper}", _listed([f"{key}: {text}" for key, text in section.settings.items()])]
    for table in section.tables:
        body = [[_shown(cell) for cell in row.values()] for row in table.rows]
        parts += [f"### {table.title}", tabulate(body, list(table.rows[0]), tablefmt="github", disable_numparse=True)]
    parts += ["Not found in the sources at hand, so chosen here:", _listed(section.not_found)] if section.not_found else []
    parts += ["Reading it:", _listed(section.notes)]
    return "\n\n".join(parts) + "\n"


def save(sections: list[Section]) -> None:
    """Write `RESULTS/papers.md` and `.json`, with the commit and the machine."""
    where = {"commit": commit(), **machine()}
    lines = ["# Published comparisons by calculation", _listed([f"{key}: {text}" for key, text in where.items()])]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "papers.md").write_text("\n\n".join(lines + [to_markdown(section) for section in sections]))
    document = {**where, "sections": [asdict(section) for section in sections]}
    (RESULTS / "papers.json").write_text(json.dumps(document, indent=1) + "\n")


def _listed(lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _shown(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
