"""The benchmark of inference compares tokens with one device, and its rows have a cell for each column."""

import pytest

from bench import inference
from tests.workers import Ranks


def test_rows_of_plans() -> None:
    prices = {
        "step_s": 0.0164,
        "hand_s": 0.0175,
        "bound_s": 0.0117,
        "peak_bytes": 2**30,
        "found_by": "search",
        "mesh": "tp=8",
    }
    row = {"row": inference.plan_name(next(iter(inference.CALLS))), **prices, "cpu_s": 50.0, "seconds": 60.0}
    (cells,) = inference.PLANS.cells(row)
    assert cells[1:] == ("tp=8", "16.40", "17.50", "11.70", "1.0", "search", "50") and len(cells) == len(
        inference.PLANS.header
    )


def measured() -> dict:
    inference.NUM_RUNS, inference.NUM_NEW, inference.FIRST_LENGTHS = 3, 3, (4, 5)
    return inference.measure_generate("gpt2", "inference", 4)


@pytest.mark.multirank
def test_a_row_of_generate(ranks4: Ranks) -> None:
    row = ranks4.run(measured)[0]
    assert row["row"] in inference.GENERATE.rows
    assert all(row[key] > 0 for key in ("alone_s", "known_s", "recorded_s", "sized_s"))
    assert all(len(line) == len(inference.GENERATE.header) for line in inference.GENERATE.cells(row))
