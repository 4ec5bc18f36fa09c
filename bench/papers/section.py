"""What is written about one paper: settings, tables with the published numbers beside ours, and what to know when reading them."""

import json
from collections.abc import Iterable, Mapping
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
    return _markdown(asdict(section))


def save(section: Section) -> None:
    """Put the section, with commit and machine, into `RESULTS/papers.json` beside the others there, and write all as `papers.md`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "papers.json"
    sections = {one["name"]: one for one in json.loads(path.read_text())["sections"]} if path.exists() else {}
    sections[section.name] = {**asdict(section), "measured": {"commit": commit(), **machine()}}
    ordered = [sections[name] for name in sorted(sections)]
    path.write_text(json.dumps({"sections": ordered}, indent=1) + "\n")
    (RESULTS / "papers.md").write_text("\n".join(["# Published comparisons by calculation\n", *map(_markdown, ordered)]))


def _markdown(section: Mapping[str, Any]) -> str:
    """Of the fields of a section, as they are in the JSON."""
    facts = section["settings"] | section.get("measured", {})
    parts = [f"## {section['name']}: {section['paper']}", _listed([f"{key}: {text}" for key, text in facts.items()])]
    for table in section["tables"]:
        body = [[_shown(cell) for cell in row.values()] for row in table["rows"]]
        parts += [f"### {table['title']}", tabulate(body, list(table["rows"][0]), tablefmt="github", disable_numparse=True)]
    if section["not_found"]:
        parts += ["Not found in the sources at hand, so chosen here:", _listed(section["not_found"])]
    return "\n\n".join([*parts, "Reading it:", _listed(section["notes"])]) + "\n"


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _shown(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
