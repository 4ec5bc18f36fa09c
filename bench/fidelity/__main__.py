"""Predicted against measured, on plans that others ran and published.

    python -m bench.fidelity [--rows 'V100'] [--resume]

No device is used. Each source's numbers are fitted on its rows marked so; `--rows` chooses sources by title. A source
is saved as soon as it is done.
"""

import sys
from typing import Any

from autopar.costmodel.cluster.hardware import Cluster
from bench.fidelity import BY_KIND, SUMMARY, TABLES, by_kind, judged
from bench.fidelity.peak_bytes import peak_bytes
from bench.fidelity.published_rows import Published
from bench.fidelity.scores import fitted
from bench.fidelity.sources import SOURCES, Source
from bench.fidelity.written_plans import step_s
from bench.report import Row, add
from bench.rows import parser, selected


def measure(source: Source) -> list[Row]:
    """The rows of a source, with the numbers fitted on some of them."""
    known = [row for row in source.rows if row.is_fitted]

    def predict(numbers: Any) -> list[float]:
        return [step_s(row.written, row.cluster(numbers), row.library) for row in known]

    numbers = fitted(predict, [row.measured_s for row in known], source.start) if known else source.start
    made = []
    for row in source.rows:
        print(f"{source.title}: {row.name}", file=sys.stderr, flush=True)
        cluster = row.cluster(numbers)
        made.append(
            {
                "row": row.name,
                "group": row.group,
                "is_fitted": row.is_fitted,
                "numbers": numbers,
                "measured_s": row.measured_s,
                "predicted_s": step_s(row.written, cluster, row.library),
                "kind": row.kind,
                "memory": _memory(row, cluster) if row.memory_bytes else None,
            }
        )
    return made


def _memory(row: Published, cluster: Cluster) -> tuple[float, float]:
    """(measured, predicted) GiB of a device."""
    return row.memory_bytes / 2**30, (peak_bytes(row.written, cluster, row.library) + row.context_bytes) / 2**30


def main(arguments: list[str] | None = None) -> None:
    """Run the sources that are asked for."""
    settings = parser(__doc__).parse_args(arguments)
    wanted = selected([SUMMARY], settings, "fidelity")[SUMMARY.title]
    for source in SOURCES:
        if source.title in wanted:
            rows = measure(source)
            found = {source.title: rows, SUMMARY.title: [judged(source, rows)], BY_KIND.title: by_kind(source, rows)}
            add("fidelity", list(TABLES.values()), found, {})
    print("written to bench/results/fidelity.md and fidelity.json")


if __name__ == "__main__":
    main()
