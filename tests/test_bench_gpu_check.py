"""`make gpu-check` runs without a GPU too, and says where a row is wrong."""

import json
from pathlib import Path

import pytest

from bench import gpu_check, report

ROW = {
    "row": "small dp=2",
    "differences": {"loss": 0.0, "gradients": 1e-7, "parameters": 2e-7},
    "is_close": True,
    "issued": 3,
    "planned": 3,
    "as_planned": True,
    "predicted_bytes": 2**20,
    "measured_bytes": 2**21,
    "times": {
        "one": {"eager": dict.fromkeys(gpu_check.PHASES, 1e-3), "compiled": dict.fromkeys(gpu_check.PHASES, 2e-3)},
        "ours": {"eager": dict.fromkeys(gpu_check.PHASES, 3e-3)},
    },
}


@pytest.mark.multirank
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_check_runs_on_a_cpu(ranks: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    options = ["--device", "cpu", "--ranks", str(ranks), "--models", "small", "--rows", "dp", "--rounds", "1"]
    assert gpu_check.main([*options, "--no-compile"]) == 0
    (rows,) = json.loads((tmp_path / f"gpu_check_cpu_x{ranks}.json").read_text()).values()
    (row,) = rows
    assert row["row"] == f"small dp={ranks}" and row["provenance"]["device"] == "CPU"
    assert row["is_close"] and row["as_planned"] and (row["issued"] > 0) == (ranks > 1)
    assert 0.9 < row["predicted_bytes"] / row["measured_bytes"] < 1.1
    assert set(row["times"]["ours"]["eager"]) == set(gpu_check.PHASES)
    assert f"small dp={ranks}" in (tmp_path / f"gpu_check_cpu_x{ranks}.md").read_text()


def test_a_wrong_row_is_no_success() -> None:
    assert gpu_check.is_right(ROW)
    assert not gpu_check.is_right(ROW | {"is_close": False})
    assert not gpu_check.is_right(ROW | {"as_planned": False})
    assert not gpu_check.is_right({"row": "small dp=2", "error": "RuntimeError: no"})


def test_the_line_of_a_row_says_what_is_wrong_and_what_was_not_run() -> None:
    ((name, *others),) = gpu_check.cells(ROW | {"is_close": False, "as_planned": False})
    assert name == "small dp=2, NOT equal" and "3 of 3, NOT as planned" in others
    assert "one 1 / 2; ours 3 / -" in others and len(others) + 1 == len(gpu_check.HEADER)


def test_without_a_gpu_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU is at hand"):
        gpu_check.main(["--device", "cuda"])
