"""The moment at which work ends with the best it has."""

import math
from dataclasses import dataclass
from time import monotonic
from typing import Optional


@dataclass
class Deadline:
    """A moment `at_s` of `time.monotonic`, or the end of the deadline it lies `within`, whichever comes first.

    Mutable, since work that is under way looks at it again and again: `stop` ends that work and all that was given a
    part of its time.
    """

    at_s: float = math.inf
    within: Optional["Deadline"] = None

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """`seconds` from now."""
        return cls(monotonic() + seconds)

    def part(self, share: float) -> "Deadline":
        """The end of `share`, from 0 to 1, of the time that is left; 0 is now, however much is left."""
        left_s = share * self.remaining_s if share else 0.0
        return Deadline(monotonic() + left_s, self)

    def stop(self) -> None:
        """Make now the end."""
        self.at_s = -math.inf

    @property
    def is_stopped(self) -> bool:
        """Whether it was moved to now."""
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
