"""Measurements on networks of this machine: of hosts in namespaces whose links tc limits, each calibrated first.

The ranks of a network are those of a module `MODULE NETWORK CALIBRATION FOLDER MODEL ...`, which torchrun starts on
every host and which writes FOLDER/MODEL.json, the fields of a row. Needs root and iproute2, but for one host alone.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from bench.emulated_cluster import emulated_cluster
from bench.report import Row, Table, add
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


_RATES = ("200mbit", "1gbit", "10gbit")
NETWORKS = (Network(1, 4), *(Network(hosts, 4 // hosts, rate) for hosts in (4, 2) for rate in _RATES))


def equal_hosts(calibration: str) -> Cluster:
    """The calibrated cluster with all devices alike: its hosts are one machine, so that what differs is noise."""
    return replace(load_cluster(calibration), groups=None)


def row_name(network: str, model: str) -> str:
    """
    >>> row_name("loopback", "gpt")
    'loopback, gpt'
    """
    return f"{network}, {model}"


def row_names(models: Iterable[str]) -> tuple[str, ...]:
    """Of each model on each network."""
    return tuple(row_name(network.name, model) for network, model in product(NETWORKS, models))


def measure(network: Network, models: Sequence[str], module: str) -> list[Row]:
    """The rows of a network, by ranks that run `module`; one that fails has an "error"."""
    with tempfile.TemporaryDirectory() as folder:
        calibration = f"{folder}/cluster.json"
        with emulated_cluster(network.num_hosts, network.rate or _RATES[-1]) as cluster:
            status = cluster.torchrun(network.num_ranks, ["-m", "autopar", "calibrate", "--out", calibration])
            if status == 0:
                ranks = ["-m", module, network.name, calibration, folder, *models]
                status = cluster.torchrun(network.num_ranks, ranks)
        return [_row(network, model, Path(folder) / f"{model}.json", status) for model in models]


def _row(network: Network, model: str, path: Path, status: int) -> Row:
    row: Row = {"row": row_name(network.name, model), "network": network.name, "model": model}
    return row | (json.loads(path.read_text()) if path.exists() else {"error": f"ended with {status}"})


def measure_rows(name: str, table: Table, module: str, description: str | None, models: Sequence[str]) -> None:
    """Measure the rows of `table` that the command line asks for, network by network, into bench/results/NAME; of
    `models`, those that can be run here.
    """
    wanted = selected([table], parser(description).parse_args(), name)[table.title]
    for network in NETWORKS:
        asked = [model for model in models if row_name(network.name, model) in wanted]
        if asked:
            print(f"{network.name}: {', '.join(asked)}", file=sys.stderr, flush=True)
            add(name, [table], {table.title: measure(network, asked, module)}, {"threads a rank": 1})
    print(f"written to bench/results/{name}.md and {name}.json")
