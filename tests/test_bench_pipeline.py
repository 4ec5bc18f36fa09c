"""What the pipeline benchmark sets beside its measurements."""

import pytest

from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import StageTimes, simulate
from bench import pipeline, report


@pytest.mark.parametrize("name, num_stages", [("1f1b", 2), ("zero-bubble", 2), ("interleaved", 4)])
def test_a_step_that_was_as_simulated_is_predicted_exactly(name, num_stages):
    schedule = Schedule(name, num_stages, 2, 4)
    times = [StageTimes(1.0 + stage, 2.0, 1.5 - stage / 8, 0.25, 0.25) for stage in range(num_stages)]
    quiet = simulate(schedule, times)
    disturbed = simulate(schedule, [StageTimes(3.0, 3.0, 3.0)] * num_stages)
    row = pipeline.row_of(pipeline.Case("even", schedule, (1,) * num_stages), [disturbed, quiet], 0.25)
    assert row["measured_s"] == quiet.step_s
    assert row["ratio"] == pytest.approx(1)
    assert row["simulated_bubble"] == pytest.approx(row["measured_bubble"]) == pytest.approx(quiet.bubble)


def test_committed_simulations_are_within_ten_per_cent():
    rows = report.load("pipeline")[pipeline.SIMULATED.title]
    assert [row["row"] for row in rows] == list(pipeline.SIMULATED.rows)
    assert all(0.9 < row["ratio"] < 1.1 for row in rows), {row["schedule"]: row["ratio"] for row in rows}


@pytest.mark.multirank
def test_a_model_in_stages_is_predicted_and_measured(ranks4):
    rows = ranks4.run(pipeline.run_model, "gpt", 0)
    assert rows[2:] == [None, None]
    assert (
        rows[0]["predicted_s"] == rows[1]["predicted_s"] > 0
        and rows[0]["ratio"] == rows[0]["predicted_s"] / rows[0]["measured_s"]
    )
    (line,) = pipeline.model_cells(rows[0])
    assert len(line) == len(pipeline.PREDICTED.header)
