"""Predicted against measured steps of many plans, on networks of this machine: how far off, and what that costs.

    python -m bench.networks [--rows 'loopback|4x1 1gbit'] [--resume]

A network is calibrated (`autopar calibrate`), then every hand plan of meshes 4 and 2x2 and the plans found for these
are run on it in turn. All lie in one process a rank; nothing that is measured here enters a fit. Needs root and
iproute2, but for the loopback of one host.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from bench.emulated_cluster import emulated_cluster
from bench.models import WORKLOADS
from bench.networks.run_ranks import FOUND, MESHES, PRESET, ROUNDS, STEPS
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected


@dataclass(frozen=True)
class Network:
    """Hosts with so many ranks each, whose cards have the rate as tc writes it; one host has none."""

    num_hosts: int
    num_ranks: int
    rate: str = ""

    @property
    def name(self) -> str:
        """
        >>> Network(2, 2, "1gbit").name, Network(1, 4).name
        ('2x2 1gbit', 'loopback')
        """
        return f"{self.num_hosts}x{self.num_ranks} {self.rate}" if self.rate else "loopback"


RATES = ("200mbit", "1gbit", "10gbit")
NETWORKS = (Network(1, 4), *(Network(hosts, 4 // hosts, rate) for hosts in (4, 2) for rate in RATES))


def row_name(network: str, model: str) -> str:
    """
    >>> row_name("loopback", "gpt")
    'loopback, gpt'
    """
    return f"{network}, {model}"


def measure(network: Network, models: list[str]) -> list[Row]:
    """The rows of a network; one that fails has an "error"."""
    with tempfile.TemporaryDirectory() as folder:
        calibration = f"{folder}/cluster.json"
        with emulated_cluster(network.num_hosts, network.rate or RATES[-1]) as cluster:
            status = cluster.torchrun(network.num_ranks, ["-m", "autopar", "calibrate", "--out", calibration])
            if status == 0:
                ranks = ["-m", "bench.networks.run_ranks", network.name, calibration, folder, *models]
                status = cluster.torchrun(network.num_ranks, ranks)
        return [_row(network, model, Path(folder) / f"{model}.json", status) for model in models]


def _row(network: Network, model: str, points: Path, status: int) -> Row:
    row: Row = {"row": row_name(network.name, model), "network": network.name, "model": model}
    if not points.exists():
        return row | {"error": f"ended with {status}"}
    return row | {"points": json.loads(points.read_text())}


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


TABLE = Table(
    "Plans on networks of this machine",
    "Training steps (forward, backward, AdamW) of gloo ranks in network namespaces whose links tc limits, one thread a"
    f" rank, median of {ROUNDS} rounds of {STEPS} steps: every hand plan of meshes"
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
    tuple(row_name(network.name, model) for network in NETWORKS for model in WORKLOADS),
    cells,
)


def main() -> None:
    """Run the rows that are asked for, network by network."""
    settings = parser(__doc__).parse_args()
    wanted = selected([TABLE], settings, "networks")[TABLE.title]
    for network in NETWORKS:
        models = [model for model in WORKLOADS if row_name(network.name, model) in wanted]
        if models:
            print(f"{network.name}: {', '.join(models)}", file=sys.stderr, flush=True)
            add("networks", [TABLE], {TABLE.title: measure(network, models)}, {"threads a rank": 1})
    print("written to bench/results/networks.md and networks.json")


if __name__ == "__main__":
    main()
