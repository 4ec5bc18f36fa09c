"""A result file is added to: rows that a run did not make stay as they were, each with where it was measured."""

import argparse
import json

import pytest

from bench import report, rows

TABLES = (
    report.Table("times", "Seconds.", ("model", "s"), ("a", "b", "c"), lambda row: [(row["row"], f"{row['s']:g}")]),
    report.Table("sizes", "", ("model", "bytes"), ("a",), lambda row: [(row["row"], str(row["bytes"]))]),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return tmp_path


def at(monkeypatch, commit: str, date: str) -> None:
    monkeypatch.setattr(report, "where", lambda: {"commit": commit, "date": date, "machine": "2 x Test"})


def test_a_run_of_one_row_leaves_the_others_in_markdown_and_json(folder, monkeypatch):
    at(monkeypatch, "one", "2026-01-01")
    report.add(
        "x",
        TABLES,
        {"times": [{"row": "c", "s": 3.0}, {"row": "a", "s": 1.0}], "sizes": [{"row": "a", "bytes": 7}]},
        {"repeat": 3},
    )
    at(monkeypatch, "two", "2026-01-02")
    report.add("x", TABLES, {"times": [{"row": "a", "s": 2.0}]}, {"repeat": 1})
    saved = json.loads((folder / "x.json").read_text())
    assert [
        (row["row"], row["s"], row["provenance"]["commit"], row["provenance"]["repeat"]) for row in saved["times"]
    ] == [("a", 2.0, "two", 1), ("c", 3.0, "one", 3)]
    assert saved["sizes"][0]["bytes"] == 7 and saved["sizes"][0]["provenance"]["commit"] == "one"
    text = (folder / "x.md").read_text()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(("| a", "| c"))
    ]
    assert cells == [["a", "2"], ["c", "3"], ["a", "7"]]
    assert "- commit two, date 2026-01-02, machine 2 x Test, repeat 1: a\n" in text
    assert (
        "- commit one, date 2026-01-01, machine 2 x Test, repeat 3: c\n" in text
        and "rows not measured yet: 1 of 3" in text
    )


def test_the_markdown_follows_from_the_json_alone(folder, monkeypatch):
    at(monkeypatch, "one", "2026-01-01")
    report.add("x", TABLES, {"times": [{"row": "a", "s": 1.0}, {"row": "b", "error": "no plan fits"}]}, {})
    assert report.to_markdown(TABLES, report.load("x")) == (folder / "x.md").read_text()
    assert "no plan fits" in (folder / "x.md").read_text()


def test_rows_of_an_older_benchmark_go(folder, monkeypatch):
    at(monkeypatch, "one", "2026-01-01")
    report.add("x", TABLES, {"times": [{"row": "a", "s": 1.0}, {"row": "no longer", "s": 1.0}]}, {})
    assert [row["row"] for row in report.load("x")["times"]] == ["a"]


def test_resuming_leaves_out_what_this_commit_has(folder, monkeypatch):
    monkeypatch.setattr(report, "commit", lambda: "now")
    monkeypatch.setattr(rows, "commit", lambda: "now")
    report.add("x", TABLES, {"times": [{"row": "a", "s": 1.0}, {"row": "b", "error": "killed"}]}, {})
    settings = argparse.Namespace(rows="a|b", resume=False)
    assert rows.selected(TABLES[:1], settings, "x")["times"] == ["a", "b"]
    settings.resume = True
    assert rows.selected(TABLES[:1], settings, "x")["times"] == ["b"]
    monkeypatch.setattr(rows, "commit", lambda: "later")
    assert rows.selected(TABLES[:1], settings, "x")["times"] == ["a", "b"]


def test_a_name_that_no_row_has_ends_the_run_and_names_the_rows(folder):
    with pytest.raises(SystemExit, match=r"'zzz' matches no row.*a; b; c"):
        rows.selected(TABLES, argparse.Namespace(rows="zzz", resume=False), "x")


def test_where_names_commit_day_and_machine():
    assert set(report.where()) == {"commit", "date", "machine", "torch"}
    assert report.where()["date"].count("-") == 2
