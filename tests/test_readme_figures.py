"""The README claims what the result files have: a quoted figure that differs from its file fails here."""

import json
import re
import shutil

import pytest

from bench import memory, papers, pipeline, readme, report, scaling, search, step
from bench.cluster import __main__ as cluster

FILES = {
    "step": step.TABLES,
    "cluster": (cluster.TABLE,),
    "search": search.RESULT_TABLES,
    "scaling": scaling.TABLES,
    "pipeline": pipeline.TABLES,
    "memory": memory.TABLES,
    "papers": papers.TABLES,
}
TEXT = readme.README.read_text()
FENCE = re.compile(r"```.*?```", re.DOTALL)
# A number with a unit, or a ratio.
FIGURE = re.compile(r"\b\d[\d.,]*\s?(?:s|ms|us|min|minutes|seconds|hours|%|[KMGT]i?B|x|times|[GT]bit/s)(?![\w-])")
# Settings, not measurements: the default time limit.
SETTINGS = {"30 s"}


def by_hand() -> str:
    """The README without code and without the blocks that are written from result files."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", readme.BLOCK.sub("", TEXT)))


def test_quoted_figures_are_those_of_the_result_files():
    assert readme.filled(TEXT) == TEXT, "run python -m bench.readme"


def test_every_block_is_in_the_readme_once():
    assert sorted(name for _, name, _, _ in readme.BLOCK.findall(TEXT)) == sorted(readme.BLOCKS)


def test_no_figure_is_quoted_by_hand():
    assert set(FIGURE.findall(by_hand())) <= SETTINGS


@pytest.mark.parametrize(
    "said", ["in 5 to 21 s", "at most 2.1 %", "1.37x", "16.7 to 17.6 % less", "takes 61 GB", "2.4 times as fast"]
)
def test_figures_quoted_by_hand_are_noticed(said):
    assert FIGURE.search(said)


@pytest.mark.parametrize("name", FILES)
def test_tables_for_people_are_those_of_the_result_files(name):
    assert (report.RESULTS / f"{name}.md").read_text() == report.to_markdown(FILES[name], report.load(name))


@pytest.mark.parametrize("name", FILES)
def test_every_committed_row_has_commit_day_and_machine_and_is_one_of_the_benchmark(name):
    for table in FILES[name]:
        for row in report.load(name).get(table.title, ()):
            assert {"commit", "date", "machine"} <= set(row["provenance"]) and row["row"] in table.rows


def test_every_quoted_table_names_commit_day_and_machine():
    for name in readme.BLOCKS.keys() - {"stages"}:
        (block,) = (body for _, found, body, _ in readme.BLOCK.findall(TEXT) if found == name)
        assert re.search(r"commit [0-9a-f]{12}.*20\d\d-\d\d-\d\d.*\d x ", block), name


@pytest.mark.parametrize(
    "file, key", [("step", "median_s"), ("search", "step_s"), ("pipeline", "measured_s"), ("memory", "error_share")]
)
def test_a_figure_that_changes_in_its_file_changes_the_readme(file, key, tmp_path, monkeypatch):
    shutil.copytree(report.RESULTS, tmp_path / "results")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    assert readme.filled(TEXT) == TEXT
    saved = report.load(file)
    for rows in saved.values():
        for row in rows:
            if key in row:
                row[key] = row[key] * 3 + 1
    (tmp_path / "results" / f"{file}.json").write_text(json.dumps(saved))
    assert readme.filled(TEXT) != TEXT


def test_a_file_without_rows_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(LookupError, match=r"step\.json has no rows .* run python -m bench\.step"):
        readme.step_block()
