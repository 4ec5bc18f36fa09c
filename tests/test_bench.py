"""What the benchmark writes down is what was measured."""

import json
from time import monotonic

import pytest

import autopar
from autopar.sbp.redistribute import Collective
from bench import measure, report, scaling, search, spawn
from bench.problem import example_of
from bench.suite import Case

ROWS = [
    report.Row("gpt", "autopar", (0.010, 0.020, 0.030), (Collective("all_reduce", (0,), 1_500_000, "backward"),)),
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


TINY = Case("gpt2", "h100", "2x2", 8, sequence=64, layers=2)


@pytest.fixture(scope="module")
def planned():
    return spawn.measured("plan", TINY, repeat=1)


def test_a_row_is_the_plan_that_a_user_gets(planned):
    example = example_of(TINY)
    plan = autopar.plan(example.model, "2x2", cluster="h100", kwargs=dict(example.kwargs))
    assert planned["mesh"] == "2x2"
    assert planned["step_s"] == pytest.approx(plan.costs.step_s, rel=1e-9)
    assert planned["memory_bytes"] == plan.costs.total_memory_bytes
    assert planned["bound_s"] <= planned["step_s"] <= planned["hand_s"]
    assert planned["hand_s"] <= min(costs.step_s for costs in plan.hand.values()) * (1 + 1e-9)


def test_times_of_a_row_add_up_and_its_memory_is_that_of_a_process_with_torch(planned):
    stages = [planned["times_s"][stage] for stage in search.STAGES]
    assert all(x > 0 for x in stages) and sum(stages) <= planned["plan_s"]
    assert 100 * 2**20 < planned["peak_bytes"] < 4 * 2**30


def in_this_process(kind, case, *, repeat):
    return measure.MEASURES[kind](case, monotonic()) | {"peak_bytes": 0}


def test_a_row_that_has_no_plan_says_why(monkeypatch):
    monkeypatch.setattr(search, "measured", in_this_process)
    section = search.section_of("plans", [Case("vgg13", "p100", "2x1", 4096)], 1, lambda _: None)
    assert len(section.cells[0]) == len(section.header)
    assert "GiB" in section.cells[0][1] and "smaller batch" in section.rows[0]["error"]


def test_a_process_that_fails_is_a_row_that_says_so():
    row = spawn.measured("plan", Case("no-such-model", "h100", "2x2", 8), repeat=1)
    assert "no built-in model 'no-such-model'" in row["error"]


def test_the_module_of_one_rank_among_many_runs_a_step():
    case = Case("gpt2", "h100", "32x8", 64, sequence=64, layers=1)
    row = in_this_process("compile", case, repeat=1)
    assert row["mesh"] == "32x8" and row["times_s"]["first step"] > 0
    (cells,) = search.format_module(case, row)
    assert len(cells) == len(search.KINDS["modules"].header)


def test_search_alone_is_proven_and_no_part_beats_all_three(monkeypatch):
    monkeypatch.setattr(measure, "PART_LIMIT_S", 2.0)
    monkeypatch.setattr(measure, "SEARCH_LIMIT_S", 2.0)
    scope = in_this_process("scope", TINY, repeat=1)
    assert scope["none"]["gap"] < 1e-9
    assert scope["none"]["step_s"] <= scope["binding"]["step_s"]
    parts = in_this_process("parts", TINY, repeat=1)["rows"]
    free = {row["part"]: row for row in parts if row["limit"] == "none"}
    assert free["all three"]["step_s"] == pytest.approx(scope["none"]["step_s"], rel=1e-9)
    for limit in ("none", "binding"):
        costs = [row["step_s"] for row in parts if row["limit"] == limit and row["step_s"] is not None]
        assert all(row["bound_s"] <= min(costs) * (1 + 1e-9) for row in parts if row["limit"] == limit and row["bound_s"] is not None)
    for kind, row in (("scope", scope), ("parts", {"rows": parts})):
        assert {len(cells) for cells in search.KINDS[kind].format(TINY, row)} == {len(search.KINDS[kind].header)}


def test_plans_as_table_and_figure(tmp_path, monkeypatch, planned):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (cells,) = search.format_plan(TINY, planned)
    section = report.Section("plans", "Text.", search.KINDS["plans"].header, (cells,), (planned,))
    text = report.save_sections("search", [section], {"repeat": 1})
    assert text.startswith("## plans\n\nText.\n\n| model ") and "- commit: " in text
    assert json.loads((tmp_path / "search.json").read_text())["plans"] == [planned]
    rows = {sweep.title: [{**planned, "x": x} for x in sweep.xs] for sweep in scaling.SWEEPS}
    scaling.draw(rows, str(tmp_path / "scaling.png"))
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
