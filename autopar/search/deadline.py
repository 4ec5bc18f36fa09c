"""`Deadline`: the time at which the search ends with its best result so far."""

import math
from dataclasses import dataclass
from time import monotonic
from typing import Optional


@dataclass
class Deadline:
    """The time `at_s` of `time.monotonic`, or the deadline `within` which it lies if that is earlier.

    Mutable, since running work looks at it repeatedly: `stop` ends that work and all work with a part of its time.
    """

    at_s: float = math.inf
    within: Optional["Deadline"] = None

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """A deadline `seconds` from now."""
        return cls(monotonic() + seconds)

    def part(self, share: float) -> "Deadline":
        """A deadline after `share`, from 0 to 1, of the time left; 0 is now."""
        left_s = share * self.remaining_s if share else 0.0
        return Deadline(monotonic() + left_s, self)

    def stop(self) -> None:
        """Move the deadline to now."""
        self.at_s = -math.inf

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` moved this deadline, or one that it lies within, to now."""
        return self.at_s == -math.inf or (self.within is not None and self.within.is_stopped)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        own_s = max(0.0, self.at_s - monotonic())
        return own_s if self.within is None else min(own_s, self.within.remaining_s)

    @property
    def is_past(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s <= 0.0


NEVER = Deadline()
