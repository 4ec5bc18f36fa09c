"""The time that planning may take: one deadline for all of it, what it tells as it goes, and how long each stage
took.
"""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import FrameType
from typing import Any, TypeVar

from autopar.planner.request import ANYTHING
from autopar.search.deadline import Deadline

Progress = Callable[[str], None]  # told in a few words what is being done
Watch = Callable[[str, Any], None]  # handed each artifact of planning, with its name
Result = TypeVar("Result")


def _quiet(_: str) -> None:
    """Tell nobody."""


def _unseen(_name: str, _artifact: Any) -> None:
    """Show nobody."""


@dataclass(frozen=True)
class Budget:
    """`timings`: stage -> seconds, summed where a stage is run several times. `where` is put before what is told.
    start_s: of the clock.
    """

    deadline: Deadline
    progress: Progress = _quiet
    where: str = ""
    timings: Counter[str] = field(default_factory=Counter)
    start_s: float = field(default_factory=perf_counter)
    watch: Watch = _unseen

    @classmethod
    def of(
        cls, time_limit_s: float = ANYTHING.time_limit_s, progress: Progress | None = None, watch: Watch | None = None
    ) -> "Budget":
        """`time_limit_s` from now."""
        return cls(Deadline.after(time_limit_s), progress or _quiet, watch=watch or _unseen)

    def show(self, name: str, artifact: Any) -> None:
        """Hand an artifact to who watches."""
        self.watch(self.where + name, artifact)

    def part(self, share: float, where: str = "") -> "Budget":
        """`share`, from 0 to 1, of the time that is left, for the work that `where` names; the timings are the same."""
        return replace(self, deadline=self.deadline.part(share), where=where or self.where)

    @property
    def is_spent(self) -> bool:
        """Whether planning is to end with the best plan so far."""
        return self.deadline.is_past

    @property
    def ended_by(self) -> str:
        """What ends planning before it is done: "its time limit", "Ctrl-C", or "" while there is time."""
        return ("Ctrl-C" if self.deadline.is_stopped else "its time limit") if self.is_spent else ""

    def run(self, stage: str, work: Callable[[], Result]) -> Result:
        """The result of `work`, timed as `stage`."""
        self.progress(self.where + stage)
        start = perf_counter()
        result = work()
        self.timings[stage] += perf_counter() - start
        return result

    @property
    def all_timings(self) -> dict[str, float]:
        """`timings`, and as "rest" what no stage has of the time since the start: together that is all of it."""
        return self.timings | {"rest": perf_counter() - self.start_s - sum(self.timings.values())}

    def tell_cost(self, stage: str, cost_s: float, lower_bound_s: float) -> None:
        """The progress of `search.solve`."""
        self.progress(
            f"{self.where}search ({stage}): {cost_s * 1e3:.3g} ms a step, at least {lower_bound_s * 1e3:.3g} ms"
        )

    @contextmanager
    def ended_by_interrupt(self) -> Iterator[None]:
        """The first Ctrl-C ends all planning with the best plan so far, the second one raises KeyboardInterrupt.

        A KeyboardInterrupt at once could strike anywhere, and a stage that caught it would end alone. Where the program
        has a handler of its own, or off the main thread, Ctrl-C does what it did.
        """
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
            yield
            return

        def stop(_signal: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, before)
            self.deadline.stop()
            self.progress("interrupted: taking the best plan so far (Ctrl-C again to give up)")

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
