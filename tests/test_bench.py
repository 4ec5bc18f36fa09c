"""What the benchmark writes down is what was measured."""

import json

from autopar.sbp.redistribute import Collective
from bench import report

ROWS = [
    report.Row("gpt", "autopar", (0.010, 0.020, 0.030), (Collective("all_reduce", 0, 1_500_000, "backward"),)),
    report.Row("gpt", "ddp", (0.040, 0.040, 0.040), ()),
]


def test_markdown_and_json_have_median_spread_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = report.save("step", ROWS, {"rounds": 3})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| gpt")]
    assert cells == [["gpt", "autopar", "20.0", "15.0 to 25.0", "1", "1.50"], ["gpt", "ddp", "40.0", "40.0 to 40.0", "0", "0.00"]]
    saved = json.loads((tmp_path / "step.json").read_text())
    assert saved["settings"] == {"rounds": 3} and {"commit", "processor", "torch"} <= set(saved)
    assert [(row["median_s"], row["num_bytes"]) for row in saved["rows"]] == [(0.02, 1_500_000), (0.04, 0)]
