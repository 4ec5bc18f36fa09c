"""What the benchmark writes down is what was measured."""

import math
from dataclasses import asdict, replace
from time import monotonic

import pytest

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.training import WHOLE_BATCH
from autopar.mesh import as_mesh
from bench import by_hand, measure, report, scaling, search, spawn
from bench.by_hand import best_by_hand
from bench.problem import example_of, graph_of
from bench.suite import Case

TINY = Case("gpt2", "h100", "2x2", 8, sequence=64, layers=2)


@pytest.fixture(scope="module")
def planned():
    return spawn.measured("plan", TINY, repeat=1)


def test_a_row_is_the_plan_that_a_user_gets(planned):
    example = example_of(TINY)
    plan = autopar.plan(example.model, "2x2", cluster="h100", kwargs=dict(example.kwargs))
    assert planned["mesh"] == str(plan.mesh) == "a0=2,a1=2"
    assert planned["step_s"] == pytest.approx(plan.step_s, rel=1e-9)
    assert (
        planned["memory_bytes"] == max(plan.memory_bytes) and planned["predicted_peak_bytes"] <= planned["limit_bytes"]
    )
    assert planned["bound_s"] <= planned["step_s"] <= planned["hand_step_s"] * (1 + 1e-9)
    # the sums by which plans by hand are ordered gather each parameter by itself, their prices in buckets
    assert planned["hand_step_s"] <= min(costs.step_s for costs in plan.hand.values()) * 1.03


def test_times_of_a_row_are_of_planning_and_its_memory_is_that_of_a_process_with_torch(planned):
    assert 0 < planned["times_s"]["trace"] + planned["times_s"]["peaks"] <= planned["plan_s"]
    assert 100 * 2**20 < planned["peak_bytes"] < 4 * 2**30


@pytest.mark.parametrize("changed", [{}, {"hand_name": None, "hand_step_s": None}, {"hand_unknown": "none of 60 fits"}])
def test_every_row_has_a_line(planned, changed):
    row = {"row": TINY.title, "cluster": "h100", "devices": "2x2", "batch": 8, **planned, **changed}
    assert {len(line) for line in search.plan_cells(row)} == {len(search.KINDS["plans"].header)}


def test_a_row_is_good_if_it_fits_and_no_plan_by_hand_is_faster():
    row = {"step_s": 1.0, "hand_step_s": 1.1, "predicted_peak_bytes": 9, "limit_bytes": 10}
    assert (
        search.is_as_good(row)
        and search.is_as_good(row | {"hand_step_s": None})
        and search.is_as_good(row | {"hand_step_s": 0.96})
    )
    assert not any(
        search.is_as_good(row | worse) for worse in ({"hand_step_s": 0.9}, {"predicted_peak_bytes": 11}, {"error": "x"})
    )


def test_a_plan_by_hand_whose_peak_does_not_fit_is_not_the_best(monkeypatch):
    """Of plans whose estimates fit, the fastest has a peak above the limit: a person recomputes more, or takes
    another.
    """
    graph, cluster = graph_of(example_of(TINY)), load_cluster("h100")
    free = best_by_hand(graph, as_mesh("2x2"), cluster, WHOLE_BATCH, math.inf)
    assert free.num_above == 0
    asked = []

    def peaks(plan):
        asked.append(plan)
        return (1,) if len(asked) > 2 else (2**62,)  # the two fastest do not fit

    monkeypatch.setattr(by_hand, "rank_peaks", peaks)
    found = best_by_hand(graph, as_mesh("2x2"), cluster, WHOLE_BATCH, 2**40)
    assert found.num_above == 2 and found.step_s >= free.step_s and found.peak_bytes == 1


def in_this_process(kind, case, *, repeat):
    return measure.MEASURES[kind](case, monotonic()) | {"peak_bytes": 0}


def test_a_row_that_has_no_plan_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(search, "measured", in_this_process)
    tiny = tmp_path / "tiny.json"
    tiny.write_text(replace(load_cluster("h100"), memory_bytes=2**20).to_json())
    row = search.row_of("plans", replace(TINY, cluster=str(tiny)), 1)
    assert "GiB" in row["error"] and "per device" in row["error"]


def test_a_process_that_fails_is_a_row_that_says_so():
    row = spawn.measured("plan", Case("no-such-model", "h100", "2x2", 8), repeat=1)
    assert "no built-in model 'no-such-model'" in row["error"]


def test_the_module_of_one_rank_among_many_runs_a_step():
    case = Case("gpt2", "h100", "32x8", 64, sequence=64, layers=1)
    row = in_this_process("compile", case, repeat=1)
    assert row["mesh"] == "a0=32,a1=8" and row["times_s"]["first step"] > 0
    (cells,) = search.module_cells({"row": case.title, "devices": case.mesh, **asdict(case), **row})
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
        assert all(
            row["bound_s"] <= min(costs) * (1 + 1e-9)
            for row in parts
            if row["limit"] == limit and row["bound_s"] is not None
        )
    for kind, row in (("scope", scope), ("parts", {"rows": parts})):
        assert {len(cells) for cells in search.KINDS[kind].cells({"row": TINY.title, **row})} == {
            len(search.KINDS[kind].header)
        }


def test_scaling_as_table_and_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    whole = in_this_process("whole", TINY, repeat=1)
    rows = {
        sweep.title: [{**whole, "row": name, "x": x} for name, x in zip(sweep.rows, sweep.xs)]
        for sweep in scaling.SWEEPS
    }
    report.add("scaling", scaling.TABLES, rows, {"repeat": 1})
    assert rows.keys() <= report.load("scaling").keys()
    scaling.draw(rows, str(tmp_path / "scaling.png"))
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
