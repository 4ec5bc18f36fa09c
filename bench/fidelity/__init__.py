"""Predicted against measured: plans that others ran and published, each as a hand plan priced by the planner."""

from collections.abc import Iterable, Mapping, Sequence

from bench.fidelity.scores import Pair, mean_error, rank_correlation, regrets, worst_error
from bench.fidelity.sources import SOURCES, Source
from bench.report import Cells, Row, Table

JUDGED = "judged rows"


def _cells(row: Row) -> Iterable[Cells]:
    error = f"{row['predicted_s'] / row['measured_s'] - 1:+.1%}"
    fitted = "fitted" if row["is_fitted"] else ""
    memory = row.get("memory") and (*(f"{gib:.1f}" for gib in row["memory"]), f"{_memory_error(row):+.1%}")
    yield row["row"], f"{row['measured_s']:.3f}", f"{row['predicted_s']:.3f}", error, fitted, *(memory or ())


def _memory_error(row: Row) -> float:
    measured, predicted = row["memory"]
    return predicted / measured - 1


_HEADER = ("plan", "measured, s", "predicted, s", "error", "", "measured, GiB", "predicted, GiB", "error")
ROWS = {source.title: Table(source.title, source.text, _HEADER, source.row_names, _cells) for source in SOURCES}


def judged(source: Source, rows: Sequence[Row]) -> Row:
    """The figures of the rows on which nothing was fitted."""
    pairs = [Pair(row["group"], row["measured_s"], row["predicted_s"]) for row in rows if not row["is_fitted"]]
    regret = regrets(pairs)
    return {
        "row": source.title,
        "numbers": dict(zip(source.numbers, rows[0]["numbers"])),
        "num_fitted_rows": sum(row["is_fitted"] for row in rows),
        "num_rows": len(pairs),
        "mean": mean_error(pairs),
        "worst": worst_error(pairs),
        "rank": rank_correlation(pairs),
        "mean_regret": sum(regret) / len(regret) if regret else None,
        "worst_regret": max(regret) if regret else None,
    }


def _judged_cells(row: Row) -> Iterable[Cells]:
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in row["numbers"].items())
    percents = ["" if row[key] is None else f"{row[key]:.1%}" for key in ("mean", "worst")]
    regret = ["" if row[key] is None else f"{row[key]:.1%}" for key in ("mean_regret", "worst_regret")]
    counts = str(row["num_fitted_rows"]), str(row["num_rows"])
    yield row["row"], numbers, *counts, *percents, f"{row['rank']:.3f}", *regret


def by_kind(source: Source, rows: Sequence[Row]) -> list[Row]:
    """The errors of the judged rows of each kind, and those of memory of all its rows."""
    made = []
    for kind in source.kinds:
        members = [row for row in rows if row["kind"] == kind]
        pairs = [Pair("", row["measured_s"], row["predicted_s"]) for row in members if not row["is_fitted"]]
        if pairs:
            made.append(
                {
                    "row": f"{source.title}: {kind}",
                    "num_rows": len(pairs),
                    "mean": mean_error(pairs),
                    "worst": worst_error(pairs),
                    "bias": sum(pair.error for pair in pairs) / len(pairs),
                    "worst_memory": max((abs(_memory_error(row)) for row in members if row["memory"]), default=None),
                }
            )
    return made


def _kind_cells(row: Row) -> Iterable[Cells]:
    memory = "" if row["worst_memory"] is None else f"{row['worst_memory']:.1%}"
    yield row["row"], str(row["num_rows"]), f"{row['mean']:.1%}", f"{row['worst']:.1%}", f"{row['bias']:+.1%}", memory


BY_KIND = Table(
    "judged rows by kind",
    "Bias: the mean of the errors with their signs. Memory: of fitted rows too, as nothing is fitted to it.",
    ("kind", "rows", "mean error", "worst", "bias", "worst of memory"),
    tuple(f"{source.title}: {kind}" for source in SOURCES for kind in source.kinds),
    _kind_cells,
)

_FITTED = "Numbers are fitted by least squares on the rows marked so, and judged on the others."
SUMMARY = Table(
    JUDGED,
    f"{_FITTED} Regret: of the plans on the same devices, how much longer the one predicted to be fastest took.",
    ("source", "fitted", "on rows", "rows", "mean error", "worst", "rank correlation", "mean regret", "worst regret"),
    tuple(source.title for source in SOURCES),
    _judged_cells,
)
TABLES: Mapping[str, Table] = {SUMMARY.title: SUMMARY, BY_KIND.title: BY_KIND, **ROWS}
