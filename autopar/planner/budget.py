"""`Budget`: the one deadline of planning, its progress reports, and the time of each of its stages."""

import _thread
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import FrameType
from typing import Any

from autopar.planner.request import ANYTHING
from autopar.search.deadline import Deadline

Progress = Callable[[str], None]  # called with a few words about the current work
Watch = Callable[[str, Any], None]  # called with the name and each artifact of planning


_AGAIN_S = 0.05  # after which Interrupted is raised again


class Interrupted(BaseException):
    """Ctrl-C ended the work that `left_at_interrupt` is around. No Exception: torch makes others of those."""


def _quiet(_: str) -> None:
    """Report no progress."""


def _unseen(_name: str, _artifact: Any) -> None:
    """Show no artifact."""


@dataclass(frozen=True)
class Budget:
    """The time of planning.

    `timings`: stage -> seconds, summed if a stage runs several times. `where`: the prefix of progress reports.
    `start_s`: the clock at the start. `has_other`: whether another way to plan follows, so that work may end without a
    plan.
    """

    deadline: Deadline
    progress: Progress = _quiet
    where: str = ""
    timings: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    start_s: float = field(default_factory=perf_counter)
    watch: Watch = _unseen
    has_other: bool = False

    @classmethod
    def of(
        cls, time_limit_s: float = ANYTHING.time_limit_s, progress: Progress | None = None, watch: Watch | None = None
    ) -> "Budget":
        """A budget of `time_limit_s` seconds from now."""
        return cls(Deadline.after(time_limit_s), progress or _quiet, watch=watch or _unseen)

    def show(self, name: str, artifact: Any) -> None:
        """Pass an artifact, called `name`, to `watch`."""
        self.watch(self.where + name, artifact)

    def part(self, share: float, where: str = "") -> "Budget":
        """A budget of `share`, from 0 to 1, of the time left, for the work that `where` names.

        It shares the timings.
        """
        return replace(self, deadline=self.deadline.part(share), where=where or self.where)

    @property
    def is_spent(self) -> bool:
        """Whether planning must end with the best plan so far."""
        return self.deadline.is_past

    @property
    def ended_by(self) -> str:
        """The reason why planning ends early: "its time limit", "Ctrl-C", or "" while there is time."""
        return ("Ctrl-C" if self.deadline.is_stopped else "its time limit") if self.is_spent else ""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A context that is reported and, unless it raises, timed as `stage`."""
        self.progress(self.where + stage)
        start = perf_counter()
        yield
        self.timings[stage] += perf_counter() - start

    @property
    def all_timings(self) -> dict[str, float]:
        """`timings` and "rest", the seconds since the start that no stage accounts for; their sum is the wall time."""
        return dict(self.timings) | {"rest": perf_counter() - self.start_s - sum(self.timings.values())}

    def tell_cost(self, stage: str, cost_s: float, lower_bound_s: float) -> None:
        """Report the progress of `search.solve`."""
        self.progress(
            f"{self.where}search ({stage}): {cost_s * 1e3:.3g} ms a step, at least {lower_bound_s * 1e3:.3g} ms"
        )

    @contextmanager
    def ended_by_interrupt(self) -> Iterator[None]:
        """A context in which the first Ctrl-C ends all planning with the best plan so far; the second one interrupts
        it.

        A KeyboardInterrupt at the first could be raised anywhere, and a stage that caught it would end alone. If the
        program has a handler of its own, or off the main thread, Ctrl-C is unchanged.
        """
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
            yield
            return

        signal.signal(signal.SIGINT, _Stop(self, before))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def left_at_interrupt(self) -> Iterator[None]:
        """A context that the Ctrl-C that ends planning leaves at once, by Interrupted: of work that looks at no
        deadline and that planning can do without.
        """
        stop = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not isinstance(stop, _Stop):
            yield
            return
        stop.raises = True
        try:
            yield
        finally:
            stop.leave()


@dataclass
class _Stop:
    """The handler of the Ctrl-C that ends planning within `budget`; the handler `before` takes all further ones.

    `raises`: whether the work at hand is left by Interrupted. That is raised again until the work is left: Python drops
    what is raised while a finalizer or a callback of a weak reference runs.
    """

    budget: Budget
    before: Callable[[int, FrameType | None], Any]
    raises: bool = False
    again: threading.Timer | None = None
    is_again: bool = False  # the next signal is that of `again`

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_again:
            self.is_again = False
        elif self.budget.deadline.is_stopped:
            self.before(number, frame)
        else:
            self.budget.deadline.stop()
            self.budget.progress("interrupted: taking the best plan so far (Ctrl-C again to give up)")
        if self.raises:
            self.again = threading.Timer(_AGAIN_S, self._interrupt_again)
            self.again.start()
            raise Interrupted

    def _interrupt_again(self) -> None:
        if self.raises:
            self.is_again = True
            _thread.interrupt_main()

    def leave(self) -> None:
        """The end of the work that is left."""
        self.raises = False
        if self.again is not None:
            self.again.cancel()
            self.again.join()
            self.again = None
