"""Results as markdown for people and JSON for comparison, with the machine they were measured on."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from tabulate import tabulate

from autopar.sbp.redistribute import Collective

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One variant on one model: seconds a step in each round, and the collectives one rank issued in one step."""

    model: str
    variant: str
    seconds: tuple[float, ...]
    collectives: tuple[Collective, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the collectives' buffers in a step (larger side)."""
        return sum(collective.num_bytes for collective in self.collectives)


@dataclass(frozen=True)
class Section:
    """A part of a report: what it shows in words, a table for people, and the same measurements for machines."""

    title: str
    text: str
    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    rows: tuple[dict[str, Any], ...]


def save_sections(name: str, sections: list[Section], settings: dict[str, Any]) -> str:
    """Write `RESULTS/name.md` and `.json`; return the markdown."""
    facts = {**settings, "commit": commit(), **machine()}
    text = "\n".join([*map(_section_text, sections), *_facts(facts), ""])
    document = {"settings": settings, "commit": commit(), **machine(), **{section.title: section.rows for section in sections}}
    _write(name, text, document)
    return text


def _section_text(section: Section) -> str:
    table = tabulate(section.cells, section.header, tablefmt="github", disable_numparse=True)
    return f"## {section.title}\n\n{section.text}\n\n{table}\n"


def _write(name: str, text: str, document: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def save(name: str, rows: list[Row], settings: dict[str, Any]) -> str:
    """Write `RESULTS/name.md` and `.json`; return the markdown."""
    where = {"commit": commit(), **machine()}
    text = to_markdown(rows, {**settings, **where})
    figures = [asdict(row) | {"median_s": median(row.seconds), "num_bytes": row.num_bytes} for row in rows]
    _write(name, text, {"settings": settings, **where, "rows": figures})
    return text


def to_markdown(rows: list[Row], facts: dict[str, Any]) -> str:
    """One table; the spread is the range of the middle half of the rounds."""
    header = ["model", "variant", "step, ms (median)", "middle half", "collectives", "MB in their buffers"]
    table = [(row.model, row.variant, *_times(row), len(row.collectives), f"{row.num_bytes / 1e6:.2f}") for row in rows]
    return "\n".join([tabulate(table, header, tablefmt="github", disable_numparse=True), "", *_facts(facts), ""])


def _facts(facts: dict[str, Any]) -> list[str]:
    return [f"- {key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in facts.items()]


def _times(row: Row) -> tuple[str, str]:
    low, _, high = quantiles(row.seconds, n=4, method="inclusive")
    return f"{1e3 * median(row.seconds):.1f}", f"{1e3 * low:.1f} to {1e3 * high:.1f}"


def commit() -> str:
    """The commit measured, with "+" if the tree has changes."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        return head + ("+" if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "autopar"], check=False).returncode else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, str]:
    """What the figures depend on."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"processor": f"{os.cpu_count()} x {names[0] if names else platform.machine()}", "torch": torch.__version__}
