"""What is written about one paper: settings, tables with the published numbers beside ours, and what to know when
reading them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.report import Cells, Row, Table

Run = Callable[[], Mapping[str, Sequence[Row]]]  # title of a table -> the rows that the case adds to it


@dataclass(frozen=True)
class Paper:
    """`settings`: what the calculation assumes. `not_known`: what the sources at hand do not say, so that it is varied.
    `notes`: how to read it. cases: name of a row of the first table -> what makes it, and rows of the others."""

    name: str
    source: str
    settings: Mapping[str, str]
    not_known: tuple[str, ...]
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    cases: Mapping[str, Run]

    @property
    def described(self) -> tuple[Table, ...]:
        """The tables, the first with what is to be known of all."""
        settings = _listed(f"{key}: {text}" for key, text in self.settings.items())
        lacks = ["Not known from the sources at hand:", _listed(self.not_known)] if self.not_known else []
        text = "\n\n".join([self.source, settings, *lacks, "Reading it:", _listed(self.notes)])
        return (replace(self.tables[0], text=text), *self.tables[1:])


def table(title: str, columns: Cells, rows: Iterable[str]) -> Table:
    """A table whose rows have these columns, numbers as they are; people see them rounded. Older rows may lack some."""
    return Table(title, "", columns, tuple(rows), lambda row: [tuple(shown(row.get(column)) for column in columns)])


def shown(cell: Any) -> str:
    """
    >>> shown(1.23456), shown("yes"), shown(None)
    ('1.235', 'yes', '-')
    """
    return "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
