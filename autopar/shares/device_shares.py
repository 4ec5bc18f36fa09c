"""Shares: how many rows of the batch each of several unequal devices gets, so that the slowest is done first."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError, InfeasibleError


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of a device. A step takes `fixed_s` if it has any rows, and `row_s` for each of them.

    `most_rows`: what its memory holds in a step; None: any number.
    """

    row_s: float
    fixed_s: float = 0.0
    most_rows: int | None = None

    def __post_init__(self) -> None:
        if not (0 < self.row_s < math.inf and 0 <= self.fixed_s < math.inf):
            raise AutoparError(
                f"a device takes a positive number of seconds for a row, and none or more besides; found row_s="
                f"{self.row_s!r}, fixed_s={self.fixed_s!r}"
            )
        if self.most_rows is not None and self.most_rows < 0:
            raise AutoparError(f"most_rows expects no negative number of rows, found {self.most_rows!r}")

    def step_s(self, rows: int) -> float:
        """Seconds for this many rows."""
        return self.fixed_s + self.row_s * rows if rows else 0.0


@dataclass(frozen=True)
class PlannedShares:
    """Rows of each device; a device without rows is left out. `step_s`: of the slowest device.

    `lower_bound_s`: what no shares take less than, fractions of rows included: the rows over the sum of the speeds.
    """

    sizes: tuple[int, ...]
    step_s: float
    lower_bound_s: float


def best_shares(num_rows: int, devices: Sequence[DeviceSpeed]) -> PlannedShares:
    """The shares of `num_rows` rows with the least time of the slowest device; no whole rows take less.

    Each row is given to the device that has it done first. That is optimal since a device's time grows with its rows:
    if the slowest device took T, each row that it has would have made every other device take T or more.
    AutoparError for no rows or no devices; InfeasibleError if the devices' memory does not hold the rows.
    """
    if num_rows < 1 or not devices:
        raise AutoparError(f"shares are of one row or more, on one device or more; found {num_rows} on {len(devices)}")
    most = [num_rows if device.most_rows is None else min(num_rows, device.most_rows) for device in devices]
    if sum(most) < num_rows:
        raise InfeasibleError(
            f"the memory of the devices holds {sum(most)} rows a step ({', '.join(map(str, most))}), the batch has"
            f" {num_rows}; accumulate over more microbatches, or take a batch of {sum(most)} or less"
        )
    sizes = [0] * len(devices)
    waiting = [(device.step_s(1), index) for index, device in enumerate(devices) if most[index]]
    heapq.heapify(waiting)
    for _ in range(num_rows):
        _, index = heapq.heappop(waiting)
        sizes[index] += 1
        if sizes[index] < most[index]:
            heapq.heappush(waiting, (devices[index].step_s(sizes[index] + 1), index))
    step_s = max(device.step_s(size) for device, size in zip(devices, sizes))
    return PlannedShares(tuple(sizes), step_s, _least_s(num_rows, devices, most))


def proportional_shares(num_rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`num_rows` in proportion to `weights`, rounded so that the sum stays, the largest remainders up.

    Of peak flop/s it is Whale's rule (Jia et al., USENIX ATC 2022, section 4.2), a plan by hand.

    >>> proportional_shares(10, (1, 1, 1)), proportional_shares(16, (15.7, 9.3))
    ((4, 3, 3), (10, 6))
    """
    if num_rows < 0 or not weights or not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
        raise AutoparError(f"expected weights that are not all 0 and not negative, found {tuple(weights)}")
    exact = [num_rows * weight / sum(weights) for weight in weights]
    sizes = [int(size) for size in exact]
    largest_first = sorted(range(len(sizes)), key=lambda index: (sizes[index] - exact[index], index))
    for index in largest_first[: num_rows - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


def _least_s(num_rows: int, devices: Sequence[DeviceSpeed], most: Sequence[int]) -> float:
    """The least T within which the devices do `num_rows` rows together, each (T - fixed) / row of them, at most what it
    holds. The rows done by T are piecewise linear in T: T lies between two of its corners.
    """

    def rows(limit_s: float) -> float:
        return sum(
            min(count, max(0.0, limit_s - device.fixed_s) / device.row_s) for device, count in zip(devices, most)
        )

    corners = sorted({x.fixed_s for x in devices} | {x.step_s(count) for x, count in zip(devices, most) if count})
    after = next(i for i, corner in enumerate(corners) if rows(corner) >= num_rows * (1 - 1e-12))
    if not after:
        return corners[0]
    low, high = corners[after - 1], corners[after]
    done, more = rows(low), rows(high)
    return low + (high - low) * min(1.0, (num_rows - done) / (more - done))
