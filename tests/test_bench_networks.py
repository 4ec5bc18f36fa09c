"""The figures of bench.networks, of points whose answers are plain; and one small network."""

import json
from pathlib import Path

import pytest

from bench.each_network import NETWORKS, Network, measure
from bench.networks import __main__ as networks
from bench.networks.__main__ import cells, rank_correlation, regret
from bench.report import add, load

POINTS = [
    {"plan": "ddp on a0=4", "predicted_s": 1.0, "preset_s": 3.0, "measured_s": 2.0},
    {"plan": "found on a0=4", "predicted_s": 2.0, "preset_s": 1.0, "measured_s": 1.0},
    {"plan": "zero3 on a0=4", "predicted_s": 3.0, "preset_s": 2.0, "measured_s": 4.0},
]


def test_figures_of_a_row() -> None:
    assert regret(POINTS) == 1.0 and regret(POINTS, "preset_s") == 0.0
    assert rank_correlation(POINTS) == pytest.approx(0.5)
    ((_, _, plans, mean, worst, preset, *rest),) = cells({"network": "loopback", "model": "gpt", "points": POINTS})
    assert (plans, mean, worst, preset) == ("3", "58 %", "100 %", "33 %")
    assert rest[-3:] == ["1000", "1000", "found on a0=4"]


@pytest.mark.emulated
def test_a_network_is_calibrated_and_its_plans_are_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.report.RESULTS", tmp_path)
    (row,) = measure(Network(2, 2, "1gbit"), ["wide-mlp"], networks.RANKS)
    assert len(row["points"]) >= 8 and all(point["measured_s"] > 0 for point in row["points"])
    add("networks", [networks.TABLE], {networks.TABLE.title: [row]}, {})
    assert load("networks")[networks.TABLE.title][0]["points"] == json.loads(json.dumps(row["points"]))


def test_networks_have_four_ranks() -> None:
    assert all(network.num_hosts * network.num_ranks == 4 for network in NETWORKS)
