"""Predicted against measured steps of many plans, on networks of this machine: how far off, and what that costs.

    python -m bench.networks [--rows 'loopback|4x1 1gbit'] [--resume]

A network is calibrated (`autopar calibrate`), then every hand plan of meshes 4 and 2x2 and the plans found for these
are run on it in turn. All lie in one process a rank; nothing that is measured here enters a fit. Needs root and
iproute2, but for the loopback of one host.
"""

from statistics import fmean

import numpy as np

from bench.each_network import measure_rows, row_names
from bench.models import NETWORK_WORKLOADS
from bench.networks.run_ranks import FOUND, MESHES, MOST_STEPS, PRESET, ROUNDS
from bench.report import Cells, Row, Table


def error(point: Row, by: str = "predicted_s") -> float:
    """The part of the measured time by which a price is off."""
    return abs(point[by] / point["measured_s"] - 1)


def regret(points: list[Row], by: str = "predicted_s") -> float:
    """The measured time of the plan with the least price over the least measured time, less 1."""
    chosen = min(points, key=lambda point: point[by])
    return chosen["measured_s"] / min(point["measured_s"] for point in points) - 1


def rank_correlation(points: list[Row], by: str = "predicted_s") -> float:
    """Spearman's, of prices and measured times."""
    ranks = [np.argsort(np.argsort([point[key] for point in points])) for key in (by, "measured_s")]
    return float(np.corrcoef(*ranks)[0, 1])


def cells(row: Row) -> list[Cells]:
    """The line of one model on one network."""
    points = row["points"]
    errors = [error(point) for point in points]
    before = [error(point, "preset_s") for point in points]
    found = min((point for point in points if point["plan"].startswith(FOUND)), key=lambda point: point["predicted_s"])
    best = min(points, key=lambda point: point["measured_s"])
    return [
        (
            row["network"],
            row["model"],
            str(len(points)),
            *(f"{100 * share:.0f} %" for share in (fmean(errors), max(errors), fmean(before))),
            f"{rank_correlation(points):.2f}",
            *(f"{100 * regret(points, by):.0f} %" for by in ("predicted_s", "preset_s")),
            *(f"{1e3 * point['measured_s']:.0f}" for point in (found, best)),
            best["plan"],
        )
    ]


RANKS = "bench.networks.run_ranks"
TABLE = Table(
    "Plans on networks of this machine",
    "Training steps (forward, backward, AdamW) of gloo ranks in network namespaces whose links tc limits, one thread a"
    f" rank, median of {ROUNDS} rounds of up to {MOST_STEPS} steps: every hand plan of meshes"
    f" {' and '.join('x'.join(map(str, shape)) for shape in MESHES)} and the plans found. Error: of the predicted step"
    f" time, under the network's own calibration and under the preset {PRESET}. Regret: how much longer the plan takes"
    " that has the least price than the fastest of all.",
    (
        "network",
        "model",
        "plans",
        "mean error",
        "worst",
        "mean, preset",
        "rank correlation",
        "regret",
        "regret, preset",
        "found, ms",
        "fastest, ms",
        "which is",
    ),
    row_names(NETWORK_WORKLOADS),
    cells,
)


def main() -> None:
    """Measure the rows that are asked for."""
    measure_rows("networks", TABLE, RANKS, __doc__, tuple(NETWORK_WORKLOADS))


if __name__ == "__main__":
    main()
