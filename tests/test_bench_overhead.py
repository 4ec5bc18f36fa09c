"""The benchmark of overhead: the same training on both sides, and rows for people."""

from bench import overhead, report


def test_a_row_is_of_models_that_train_alike(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setitem(overhead.SIZES, "toy of hidden 64", overhead.Size(16, 1, 8, 2, 1.5))
    overhead.main(["--rows", "toy of hidden 64, eager", "--rounds", "3"])
    (row,) = report.load("overhead")["overhead"]
    assert row["original_s"] > 0 and 0.5 < row["ratio"] < 20
    assert "| toy of hidden 64, eager |" in (tmp_path / "overhead.md").read_text()
