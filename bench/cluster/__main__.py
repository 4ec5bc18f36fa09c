"""Steps of autopar beside those of DDP, FSDP2 and tensor parallelism on networks of this machine, in one run.

    python -m bench.cluster [--rows 'loopback|4x1 1gbit'] [--resume]

A network is calibrated, then autopar, with the mesh left open and in each library's layout, and the libraries take
turns in the same processes. Before it is timed, every variant trains a few steps whose losses must be those of one
process. Needs root and iproute2, but for the loopback of one host.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.cluster.run_ranks import DDP, OWN, ROUNDS, SAME
from bench.emulated_cluster import emulated_cluster
from bench.models import WORKLOADS
from bench.networks.__main__ import NETWORKS, RATES, Network, row_name
from bench.networks.run_ranks import STEPS
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected

Seconds = dict[str, list[float]]


def measure(network: Network, models: list[str]) -> list[Row]:
    """The rows of a network; one that fails has an "error"."""
    with tempfile.TemporaryDirectory() as folder:
        calibration = f"{folder}/cluster.json"
        with emulated_cluster(network.num_hosts, network.rate or RATES[-1]) as cluster:
            status = cluster.torchrun(network.num_ranks, ["-m", "autopar", "calibrate", "--out", calibration])
            if status == 0:
                ranks = ["-m", "bench.cluster.run_ranks", calibration, folder, *models]
                status = cluster.torchrun(network.num_ranks, ranks)
        return [_row(network, model, Path(folder) / f"{model}.json", status) for model in models]


def _row(network: Network, model: str, path: Path, status: int) -> Row:
    row: Row = {"row": row_name(network.name, model), "network": network.name, "model": model}
    return row | (json.loads(path.read_text()) if path.exists() else {"error": f"ended with {status}"})


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """(median, least, most) of the rounds' ratios; with 7 rounds the last two enclose the median with 98 %.

    >>> ratio([2.0, 1.0, 3.0], [2.0, 2.0, 2.0])
    (1.0, 0.5, 1.5)
    """
    ratios = [mine / theirs for mine, theirs in zip(one, other, strict=True)]
    return median(ratios), min(ratios), max(ratios)


def fastest(seconds: Seconds, library: str = "") -> str:
    """The variant of least median time, of a library or of all."""
    by_hand = [name for name in seconds if not name.startswith(OWN) and name.startswith(library)]
    if library and library != DDP:
        by_hand = [library]
    return min(by_hand, key=lambda name: median(seconds[name]))


def _shown(mine: list[float], theirs: list[float]) -> str:
    middle, least, most = ratio(mine, theirs)
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def cells(row: Row) -> list[Cells]:
    """The line of one model on one network."""
    seconds: Seconds = row["seconds"]
    best = fastest(seconds)
    same = (
        _shown(seconds[f"{OWN} as {library}"], seconds[fastest(seconds, library)])
        if f"{OWN} as {library}" in seconds
        else "-"
        for library in SAME
    )
    times = (f"{1e3 * median(seconds[name]):.0f}" for name in (OWN, best))
    return [(row["network"], row["model"], *times, best, _shown(seconds[OWN], seconds[best]), *same)]


TABLE = Table(
    "Steps beside libraries on networks of this machine",
    "Training steps (forward, backward, AdamW) of four gloo ranks in network namespaces whose links tc limits, one"
    f" thread a rank, ratios of {ROUNDS} rounds of {STEPS} steps in turn: median, least and most. autopar: mesh left"
    " open, planned for the network's own calibration. As a library: the same layout, run by autopar, over the library"
    " (DDP: the best of three bucket sizes).",
    (
        "network",
        "model",
        "autopar, ms",
        "best by hand, ms",
        "which is",
        "autopar over it",
        *(f"as {library}" for library in SAME),
    ),
    tuple(row_name(network.name, model) for network in NETWORKS for model in WORKLOADS),
    cells,
)


def main() -> None:
    """Run the rows that are asked for, network by network."""
    settings = parser(__doc__).parse_args()
    wanted = selected([TABLE], settings, "cluster")[TABLE.title]
    for network in NETWORKS:
        models = [model for model in WORKLOADS if row_name(network.name, model) in wanted]
        if models:
            print(f"{network.name}: {', '.join(models)}", file=sys.stderr, flush=True)
            add("cluster", [TABLE], {TABLE.title: measure(network, models)}, {"threads a rank": 1})
    print("written to bench/results/cluster.md and cluster.json")


if __name__ == "__main__":
    main()
