"""The benchmark of calls of other sizes counts what is made for each call and compares the losses."""

import pytest

from bench import shapes
from tests.workers import Ranks

SIZES = {"first call": (4, 8), "second length": (4, 12), "third length": (4, 9)}


def measured() -> list[dict]:
    shapes.NUM_RANKS, shapes.SIZES = 4, SIZES
    return shapes.measure_calls("transformer")


@pytest.mark.multirank
def test_rows_of_calls(ranks4: Ranks) -> None:
    rows = ranks4.run(measured)[0]
    assert [row["row"] for row in rows] == [f"transformer, {call}" for call in SIZES]
    assert [row["plans"] for row in rows] == [1, 0, 0] and [row["exports"] for row in rows] == [1, 0, 0]
    assert all(row["distance"] < 1e-5 and row["seconds"] > 0 for row in rows)
    assert all(len(line) == len(shapes.CALLS.header) for row in rows for line in shapes.CALLS.cells(row))


def test_rows_of_generate() -> None:
    row = {"row": "gpt2, first prompt", "seconds": 3.0, "cpu_s": 2.0, "alone_s": 1.5, "exports": 2, "plans": 2}
    cells = ("gpt2, first prompt", "3000", "2000", "1500", "1000", "2.0", "2.0", "2", "2")
    assert list(shapes.GENERATE.cells(row | {"alone_cpu_s": 1.0})) == [cells]
