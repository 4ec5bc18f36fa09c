"""How long each stage of planning takes, told as it goes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

Progress = Callable[[str], None]  # told in a few words what is being done
Result = TypeVar("Result")


@dataclass
class Clock:
    """`timings`: stage -> seconds, summed where a stage is run several times. `where` is put before what is told."""

    progress: Progress
    where: str = ""
    timings: Counter[str] = field(default_factory=Counter)

    def run(self, stage: str, work: Callable[[], Result]) -> Result:
        """The result of `work`, timed as `stage`."""
        self.progress(self.where + stage)
        start = perf_counter()
        result = work()
        self.timings[stage] += perf_counter() - start
        return result

    def tell_cost(self, stage: str, cost_s: float, lower_bound_s: float) -> None:
        """The progress of `search.solve`."""
        self.progress(f"{self.where}search ({stage}): {cost_s * 1e3:.3g} ms a step, at least {lower_bound_s * 1e3:.3g} ms")
