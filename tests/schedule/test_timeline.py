"""A timeline's text and its trace file show when each rank computes and waits."""

import json

import pytest

from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.timeline import Action, Span, Timeline, format_timeline, trace_json

# Two ranks, two microbatches; a forward takes 1 ms, a backward 2 ms.
SHORT = simulate(Schedule("1f1b", 2, 2, 2), [StageTimes(1e-3, 2e-3)] * 2)

TEXT = """\
Timeline of 9 ms, bubble 33.3%:
rank 0 |0011....aaaa..bbbb|
rank 1 |..00aaaa11bbbb....|
(0 to 9 forward of a microbatch (its last digit), a to j its backward, w a deferred weight gradient, . idle)

rank    stages    forward    backward    idle    mostly
------  --------  ---------  ----------  ------  -----------
0       0         2 ms       4 ms        33.3%   for stage 1
1       1         2 ms       4 ms        33.3%   for the end"""


def test_text_shows_who_computes_and_waits_when():
    assert "\n".join(line.rstrip() for line in format_timeline(SHORT, width=18).splitlines()) == TEXT


def test_weights_that_were_put_off_are_shown():
    timeline = simulate(Schedule("zero-bubble", 2, 2, 2), [StageTimes(1e-3, 1e-3, 1e-3)] * 2)
    rows = [
        line.split("|")[1]
        for line in format_timeline(timeline, width=int(timeline.step_s * 1e3 + 0.5)).splitlines()[1:3]
    ]
    # The first stage has no gradient of inputs to give: all of its backward is that of its weights.
    assert [row.count("w") for row in rows] == [4, 2] and rows[1].count("a") == 1


def test_more_than_ten_microbatches_show_their_last_digit():
    row = tuple(Span(Action("F", 0, k), float(k), k + 1.0) for k in range(12))
    assert "|012345678901|" in format_timeline(Timeline((row,)), width=12)


def test_trace_file_has_every_span_and_wait_in_microseconds():
    trace = json.loads(trace_json({"planned": SHORT, "measured": SHORT}))
    assert trace["displayTimeUnit"] == "ms"
    names = [(e["pid"], e.get("tid"), e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names[:3] == [(0, None, "planned"), (0, 0, "rank 0"), (0, 1, "rank 1")]
    assert names[3:] == [(1, None, "measured"), (1, 0, "rank 0"), (1, 1, "rank 1")]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    spans = {(e["name"], e["tid"]): (e["ts"], e["dur"]) for e in events if e["cat"] != "wait"}
    assert spans == {
        (str(span.action), rank): (pytest.approx(1e6 * span.start_s), pytest.approx(1e6 * (span.end_s - span.start_s)))
        for rank, row in enumerate(SHORT.rows)
        for span in row
    }
    for rank in (0, 1):  # a rank always either computes or waits
        assert sum(e["dur"] for e in events if e["tid"] == rank) == pytest.approx(1e6 * SHORT.step_s)
