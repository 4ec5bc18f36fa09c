"""`TimeWatch`: what the ranks' compute times of the last steps say of their shares of the batch."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.shares.device_shares import DeviceSpeed, best_shares

# (steps, of which so many, share of the step): a straggler is persistent if in so many of the last steps other shares
# would have made the step shorter by this share of it, and by the median of these steps too; less, and fewer, is
# transient. Two medians of four differ by a few per cent on a quiet machine, those of sixteen by less than one.
SOON, LATER = (4, 3, 0.05), (16, 16 * 3 // 4, 0.02)
SETTLING = 1  # steps after a change that are not looked at


@dataclass(frozen=True)
class Advice:
    """Better shares. `gain`: the share of the slowest rank's time that they save. `without`: ranks whose one row takes
    longer than a step of the others, without which it would take `without_s`; () if there are none.
    """

    sizes: tuple[int, ...]
    gain: float
    step_s: float
    without: tuple[int, ...] = ()
    without_s: float = 0.0


@dataclass
class TimeWatch:
    """The times of the last steps under the present shares, `sizes`.

    `most_rows`: what the memory of a rank holds; None if that is not known. `unit`: the rows of a rank are a multiple.
    """

    sizes: tuple[int, ...]
    most_rows: int | None = None
    unit: int = 1
    recent: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=LATER[0]))
    num_settling: int = SETTLING

    def take(self, times_s: Sequence[float]) -> Advice | None:
        """Note a step, of which each rank computed for so long; better shares, if a straggler is persistent."""
        if self.num_settling:
            self.num_settling -= 1
            return None
        self.recent.append(tuple(times_s))
        return self._advice_of(*SOON) or self._advice_of(*LATER)

    def _advice_of(self, window: int, num_persistent: int, least_gain: float) -> Advice | None:
        """Better shares by the last `window` steps, if they gain as much in so many of them and by the median."""
        recent = list(self.recent)[-window:]
        if len(recent) < num_persistent:
            return None
        times = [statistics.median(of_rank) for of_rank in zip(*recent)]
        least_s = sum(self.sizes) / sum(size / max(time_s, 1e-9) for time_s, size in zip(times, self.sizes))
        if 1 - least_s / max(times) < least_gain:  # not even parts of rows gain as much
            return None
        advice = self._advice(times)
        gains = [self._gain(advice.sizes, one) for one in recent]
        is_persistent = advice.gain >= least_gain and sum(gain >= least_gain for gain in gains) >= num_persistent
        return advice if is_persistent else None

    def change(self, sizes: tuple[int, ...]) -> None:
        """The ranks have other shares from now on."""
        self.sizes, self.num_settling = sizes, SETTLING
        self.recent.clear()

    def _gain(self, sizes: Sequence[int], times_s: Sequence[float]) -> float:
        """The share of the slowest rank's time that these sizes save, if times are in proportion to rows."""
        found = max(time_s * size / now for time_s, size, now in zip(times_s, sizes, self.sizes))
        return 1 - found / max(times_s)

    def _advice(self, times_s: Sequence[float]) -> Advice:
        """Better shares, found in multiples of `unit`."""
        most = None if self.most_rows is None else self.most_rows // self.unit
        total = sum(self.sizes) // self.unit
        devices = [DeviceSpeed(max(t, 1e-9) * self.unit / n, most_rows=most) for t, n in zip(times_s, self.sizes)]
        free = best_shares(total, devices)
        without = tuple(rank for rank, size in enumerate(free.sizes) if not size)
        # the ranks are a fixed mesh, so that each has a row at least
        rest = [
            DeviceSpeed(one.row_s, one.row_s, None if one.most_rows is None else one.most_rows - 1) for one in devices
        ]
        more = best_shares(total - len(devices), rest).sizes if total > len(devices) else (0,) * len(devices)
        step_s = max(device.step_s(size + 1) for device, size in zip(devices, more))
        sizes = tuple((size + 1) * self.unit for size in more)
        return Advice(sizes, self._gain(sizes, times_s), step_s, without, free.step_s if without else 0.0)
