"""A pipeline's step as it was simulated or measured: who computes what, and when."""

from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    """One computation: kind "F", "B", "I" or "W" (see schedule.actions) of a stage and a microbatch."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Span(NamedTuple):
    """An action and its seconds since the step began."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of each rank of the pipeline axis, in order."""

    rows: tuple[tuple[Span, ...], ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last rank has done its last action."""
        return max(row[-1].end_s for row in self.rows)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they compute nothing."""
        busy_s = sum(span.end_s - span.start_s for row in self.rows for span in row)
        return 1 - busy_s / (self.step_s * len(self.rows))
