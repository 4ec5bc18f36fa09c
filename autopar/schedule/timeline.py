"""`Timeline`: when each rank of a pipeline computes what, simulated or measured; as text and as a trace file."""

import json
import string
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tabulate import tabulate

from autopar.units import format_seconds

KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
WIDTH = 100  # columns of a row of text
# A microbatch is drawn by its last digit: a forward as the digit, a backward as the letter of that position.
LETTERS = {"F": "0123456789", "B": "abcdefghij", "I": "abcdefghij", "W": "wwwwwwwwww"}
DIGITS = string.digits + string.ascii_lowercase + "+"
LEGEND = "0 to 9 forward of a microbatch (its last digit), a to j its backward, w a deferred weight gradient, . idle"


class Action(NamedTuple):
    """One computation of a stage for a microbatch; kind "F", "B", "I" or "W" (see `orders.actions`)."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Span(NamedTuple):
    """An action with its start and end, in seconds since the step began."""

    action: Action
    start_s: float
    end_s: float


class Wait(NamedTuple):
    """A time in which a rank computes nothing, and the reason."""

    reason: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of each rank of the pipeline axis, in order."""

    rows: tuple[tuple[Span, ...], ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last action of any rank ends."""
        return max(row[-1].end_s for row in self.rows)

    @property
    def bubble(self) -> float:
        """The bubble: the share of the ranks' time in which they compute nothing."""
        busy_s = sum(span.end_s - span.start_s for row in self.rows for span in row)
        return 1 - busy_s / (self.step_s * len(self.rows))

    def waits(self, rank: int) -> Iterator[Wait]:
        """The times in which `rank` computes nothing: it waits for the
        input of its next action, or for the step's end.
        """
        row, free_s = self.rows[rank], 0.0
        for action, start_s, end_s in row:
            if start_s > free_s:
                yield Wait(f"for stage {action.stage + (-1 if action.kind == 'F' else 1)}", free_s, start_s)
            free_s = end_s
        if self.step_s > free_s:
            yield Wait("for the end", free_s, self.step_s)


def format_timeline(timeline: Timeline, width: int = WIDTH) -> str:
    """The timeline as text: a row of `width` columns for each rank, and a table of where its time goes."""
    num_digits = len(str(len(timeline.rows) - 1))
    drawn = [
        f"rank {rank:>{num_digits}} |{_drawn(row, timeline.step_s, width)}|" for rank, row in enumerate(timeline.rows)
    ]
    kinds = [kind for kind in KINDS if any(span.action.kind == kind for row in timeline.rows for span in row)]
    lines = [_times(timeline, rank, kinds) for rank in range(len(timeline.rows))]
    table = tabulate(lines, ["rank", "stages", *map(KINDS.__getitem__, kinds), "idle", "mostly"], disable_numparse=True)
    head = f"Timeline of {format_seconds(timeline.step_s)}, bubble {timeline.bubble:.1%}:"
    return "\n".join([head, *drawn, f"({LEGEND})", "", table])


def format_counts(rows: Sequence[Sequence[tuple[float, int]]], step_s: float, width: int = WIDTH) -> str:
    """Step functions as text: a row of `width` columns for each rank, above 9 in letters.

    `rows`: for each rank (time in seconds, number from then on); a column shows the number at its middle.
    """
    num_digits = len(str(len(rows) - 1))
    return "\n".join(f"rank {rank:>{num_digits}} |{_counted(row, step_s, width)}|" for rank, row in enumerate(rows))


def _counted(row: Sequence[tuple[float, int]], step_s: float, width: int) -> str:
    times = [time_s for time_s, _ in row]
    numbers = (row[bisect_right(times, (column + 0.5) * step_s / width) - 1][1] for column in range(width))
    return "".join(DIGITS[min(number, len(DIGITS) - 1)] for number in numbers)


def _drawn(row: tuple[Span, ...], step_s: float, width: int) -> str:
    """One rank's row: each column shows the action at its middle."""
    spans, columns = list(reversed(row)), []
    for column in range(width):
        now_s = (column + 0.5) * step_s / width
        while spans and spans[-1].end_s <= now_s:
            spans.pop()
        action, is_running = spans[-1].action if spans else None, bool(spans) and spans[-1].start_s <= now_s
        columns.append(LETTERS[action.kind][action.microbatch % 10] if action and is_running else ".")
    return "".join(columns)


def _times(timeline: Timeline, rank: int, kinds: Sequence[str]) -> list[str]:
    computed, waited = defaultdict(float), defaultdict(float)
    for action, start_s, end_s in timeline.rows[rank]:
        computed[action.kind] += end_s - start_s
    for reason, start_s, end_s in timeline.waits(rank):
        waited[reason] += end_s - start_s
    stages = ", ".join(map(str, sorted({span.action.stage for span in timeline.rows[rank]})))
    longest = max(waited, key=waited.__getitem__, default="")
    cells = [format_seconds(computed[kind]) for kind in kinds]
    return [str(rank), stages, *cells, f"{sum(waited.values()) / timeline.step_s:.1%}", longest]


def trace_json(
    timelines: Mapping[str, Timeline],
    memory: Mapping[int, Sequence[tuple[float, Mapping[str, int]]]] | None = None,
    once: Sequence[Mapping[str, float]] = (),
) -> str:
    """The timelines as a trace file for Perfetto or chrome://tracing: a process for each, a thread for each rank.

    `memory`: for ranks of the first timeline, (time in seconds, bytes by kind from then on). `once`: for each of its
    ranks the seconds of what it does once a step, which counts as behind all actions.
    """
    events = [
        event for number, (name, timeline) in enumerate(timelines.items()) for event in _events(number, name, timeline)
    ]
    for rank, own in enumerate(once):
        start_s = next(iter(timelines.values())).step_s
        for name, seconds in own.items():
            at = {"pid": 0, "tid": rank, "name": name, "cat": "once a step", "args": {}}
            events += [{"ph": "X", **at, **_when(start_s, start_s + seconds)}] if seconds else []
            start_s += seconds
    for rank, moments in (memory or {}).items():
        name = f"memory of rank {rank}, bytes"
        events += [
            {"ph": "C", "pid": 0, "name": name, "ts": 1e6 * time_s, "args": dict(sizes)} for time_s, sizes in moments
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)


def _events(process: int, name: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of one timeline in Trace Event Format: complete events "X" in microseconds, metadata "M"."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for rank, row in enumerate(timeline.rows):
        at = {"pid": process, "tid": rank}
        yield {"ph": "M", **at, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for action, start_s, end_s in row:
            args = {"stage": action.stage, "microbatch": action.microbatch}
            yield {
                "ph": "X",
                **at,
                "name": str(action),
                "cat": KINDS[action.kind],
                "args": args,
                **_when(start_s, end_s),
            }
        for reason, start_s, end_s in timeline.waits(rank):
            yield {"ph": "X", **at, "name": f"waits {reason}", "cat": "wait", "args": {}, **_when(start_s, end_s)}


def _when(start_s: float, end_s: float) -> dict[str, float]:
    return {"ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s)}
