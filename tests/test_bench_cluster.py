"""The figures of bench.cluster, of times whose ratios are plain; and one small network."""

from pathlib import Path

import pytest

from bench.cluster import __main__ as cluster
from bench.cluster.__main__ import cells, fastest, ratio
from bench.each_network import Network, measure
from bench.report import add, load

SECONDS = {
    "autopar": [1.0, 1.0, 1.0],
    "autopar as DDP": [2.0, 3.0, 4.0],
    "DDP, 1 MB": [4.0, 4.0, 4.0],
    "DDP, 5 MB": [2.0, 2.0, 2.0],
    "FSDP2": [3.0, 3.0, 3.0],
    "FSDP2, gathered once": [1.0, 1.0, 1.0],
    "floor of DDP": [0.5, 1.0, 1.0],
}


def test_figures_of_a_row() -> None:
    assert fastest(SECONDS) == "FSDP2, gathered once" and fastest(SECONDS, "FSDP2") == "FSDP2"
    assert fastest(SECONDS, "DDP") == "DDP, 5 MB"
    assert ratio(SECONDS["autopar as DDP"], SECONDS["DDP, 5 MB"]) == (1.5, 1.0, 2.0)
    (line,) = cells({"network": "loopback", "model": "gpt", "seconds": SECONDS})
    assert line[2:6] == ("1000", "1000", "FSDP2, gathered once", "1.00 (1.00 to 1.00)")
    assert line[6:] == ("1.50 (1.00 to 2.00)", "-", "-", "-", "-", "4.00 (3.00 to 4.00)")


@pytest.mark.emulated
def test_libraries_and_autopar_train_the_same_model_on_a_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.report.RESULTS", tmp_path)
    (row,) = measure(Network(2, 2, "10gbit"), ["wide-mlp"], cluster.RANKS)
    assert len(row["seconds"]) == 18 and 0 <= row["overlap"] <= 1
    add("cluster", [cluster.TABLE], {cluster.TABLE.title: [row]}, {})
    assert load("cluster")[cluster.TABLE.title][0]["model"] == "wide-mlp"
